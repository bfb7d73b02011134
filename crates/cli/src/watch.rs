//! `--serve`: a page in a browser, made anew while what it shows goes on.

use std::process::ExitCode;
use std::thread;

use anyhow::Result;
use espalier_report::Page;
use espalier_report::serve::Server;
use espalier_train::Error;

use crate::output::print_err;

/// Serves a page until the process ends; `what` it is of is said with the address.
pub fn watch(address: &str, what: &str, page: impl FnMut() -> Page + Send + 'static) -> Result<ExitCode> {
    let server = bind(address)?;
    print_err!("{what} at http://{}/ until this is interrupted", server.address());
    server.run(page)?;
    Ok(ExitCode::SUCCESS)
}

/// Serves a page on a thread of its own, for as long as the command that it shows runs.
pub fn watch_beside(address: &str, what: &str, page: impl FnMut() -> Page + Send + 'static) -> Result<()> {
    let server = bind(address)?;
    print_err!("{what} at http://{}/ while it runs", server.address());
    thread::Builder::new().name("serve".into()).spawn(move || server.run(page))?;
    Ok(())
}

fn bind(address: &str) -> Result<Server> {
    let why = |why| format!("nothing can be served at this address: {why}");
    let bound = Server::bind(address).map_err(|error| Error::File { path: address.into(), why: why(error) });
    Ok(bound?)
}
