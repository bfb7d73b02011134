//! A world of one keeps the promises of every other, but for messages to others, which it has none of.

use espalier_comm::{Communicator, Error};

use crate::suite::CASES;

#[test]
fn the_suite() {
    let talks = |error: &Error| error.to_string().contains("nobody to talk to");
    let mut kept = 0;
    for (name, case) in CASES {
        match case(&Communicator::single_rank()) {
            Ok(()) => kept += 1,
            Err(error) => assert!(talks(&error), "{name}: {error}"),
        }
    }
    assert!(kept >= 8, "only {kept} cases need no other rank");
}
