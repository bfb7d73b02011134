//! `--serve`: a page in a browser, made anew while what it shows goes on.

use std::process::ExitCode;

use anyhow::Result;
use espalier_report::Page;
use espalier_report::serve::Server;
use espalier_train::Error;

use crate::say::say;

/// Serves a page until the process ends; `what` it is of is said with the address.
pub fn watch(address: &str, what: &str, page: impl FnMut() -> Page + Send + 'static) -> Result<ExitCode> {
    let why = |why| format!("nothing can be served at this address: {why}");
    let server =
        Server::bind(address).map_err(|error| Error::File { path: address.into(), why: why(error) })?;
    say!("{what} at http://{}/ until this is interrupted", server.address());
    server.run(page)?;
    Ok(ExitCode::SUCCESS)
}
