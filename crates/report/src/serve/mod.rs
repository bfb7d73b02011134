//! A page over HTTP, for whoever wants to watch something that goes on: on `std::net` alone, since all there
//! is to do is to answer two paths.
//!
//! Nothing of a request names a file: the page is made by a function, whatever was asked for. A flood costs
//! little: the page is made at most once a second, and less often where that takes long; so many connections
//! are served at once and no more; each has a few seconds, and a request a few kilobytes. A page of somebody
//! else's cannot read this one through a browser that has both open: on a loopback address only requests for
//! that address, or for `localhost`, are answered.
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page, which asks for the other |
//! | `/live` | its content, or 304 where that is what the client has (`ETag`) |

mod request;
mod response;

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::Page;
use request::{RequestError, RequestHead};
use response::{Responder, Response};

/// Where a page is served unless it is said otherwise: for this machine alone.
pub const ADDRESS: &str = "127.0.0.1:8700";

/// Connections that are served at once; a page and its refreshes need one or two.
const CONNECTIONS: usize = 32;
/// Bytes of a request's head; a browser sends less than one thousand.
const MAX_HEAD_BYTES: usize = 8 * 1024;
/// For a request to arrive, and for its answer to be taken.
const ARRIVES_WITHIN: Duration = Duration::from_secs(5);
const TAKEN_WITHIN: Duration = Duration::from_secs(20);

/// A listening socket.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
}

impl Server {
    /// Listens at `ADDRESS`, `:PORT`, `HOST` or `HOST:PORT`; the host is this machine's loopback unless it is
    /// named.
    pub fn bind(address: &str) -> io::Result<Server> {
        let (host, port) = split_address(address);
        let addresses = (host, port.parse::<u16>().map_err(|_| not_an_address(port))?).to_socket_addrs()?;
        let listener = TcpListener::bind(&addresses.collect::<Vec<_>>()[..])?;
        let address = listener.local_addr()?;
        Ok(Server { listener, address })
    }

    /// Where it listens: with the port that it was given, where that was left open by `:0`.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until the process ends.
    pub fn run(self, render: impl FnMut() -> Page + Send + 'static) -> io::Result<()> {
        let responder = Responder::new(render, self.address.ip().is_loopback());
        self.respond(responder)
    }

    fn respond(self, responder: Responder) -> io::Result<()> {
        let responder = Arc::new(responder);
        let open = Arc::new(AtomicUsize::new(0));
        for connection in self.listener.incoming() {
            let Ok(stream) = connection else {
                // Of what can go wrong here most is over in a moment: no more file descriptors, a client that
                // left at once.
                thread::sleep(Duration::from_millis(20));
                continue;
            };
            let slot = ConnectionSlot::take(&open);
            if slot.number > CONNECTIONS {
                // Dropped: whoever is in earnest asks again.
                continue;
            }
            let responder = responder.clone();
            let served = thread::Builder::new().stack_size(512 * 1024).spawn(move || {
                let _slot = slot;
                // Whoever hangs up has what he wants.
                let _ = serve(stream, &responder);
            });
            drop(served);
        }
        Ok(())
    }
}

/// A connection among those that are served at once, given back when it is dropped.
struct ConnectionSlot {
    number: usize,
    open: Arc<AtomicUsize>,
}

impl ConnectionSlot {
    fn take(open: &Arc<AtomicUsize>) -> ConnectionSlot {
        ConnectionSlot { number: open.fetch_add(1, Ordering::SeqCst) + 1, open: open.clone() }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

/// One request, one answer.
fn serve(mut stream: TcpStream, responder: &Responder) -> io::Result<()> {
    let response = match read_head(&mut stream, Instant::now() + ARRIVES_WITHIN) {
        Ok(head) => responder.respond_to(&head),
        Err(RequestError::HungUp) => return Ok(()),
        Err(error) => Response::refusal(&error),
    };
    write_within(&mut stream, &response.bytes(), Instant::now() + TAKEN_WITHIN)?;
    stream.shutdown(Shutdown::Write)?;
    // What is still on its way is read, a little of it: closed over unread bytes, the connection would take
    // the answer with it.
    stream.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut rest = [0; 4096];
    for _ in 0..16 {
        if stream.read(&mut rest)? == 0 {
            break;
        }
    }
    Ok(())
}

/// Everything up to the empty line.
fn read_head(stream: &mut TcpStream, until: Instant) -> Result<RequestHead, RequestError> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 1024];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RequestError::TimedOut);
        }
        stream.set_read_timeout(Some(left)).map_err(|_| RequestError::HungUp)?;
        let read = match stream.read(&mut buffer) {
            Ok(0) => return Err(RequestError::HungUp),
            Ok(read) => read,
            Err(why) if matches!(why.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                return Err(RequestError::TimedOut);
            }
            Err(why) if why.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return Err(RequestError::HungUp),
        };
        bytes.extend_from_slice(&buffer[..read]);
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            return RequestHead::parse(&bytes[..end]);
        }
        if bytes.len() > MAX_HEAD_BYTES {
            return Err(RequestError::TooLong);
        }
    }
}

/// Writes all of it, or fails when the time is over, however little a client takes at a time.
fn write_within(stream: &mut TcpStream, mut bytes: &[u8], until: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            Err(why) => return Err(why),
        }
    }
    Ok(())
}

/// Host and port of an address of which either may be left out.
fn split_address(address: &str) -> (&str, &str) {
    let (usual_host, usual_port) = ADDRESS.split_once(':').expect("an address of ours");
    let is_port = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match address.rsplit_once(':') {
        None if is_port(address) => (usual_host, address),
        None => (address, usual_port),
        Some(("", port)) => (usual_host, port),
        // An address of IPv6 has colons itself: with a port it stands in brackets.
        Some((host, port)) if !host.contains(':') || host.starts_with('[') => {
            (host.trim_start_matches('[').trim_end_matches(']'), port)
        }
        Some(_) => (address, usual_port),
    }
}

fn not_an_address(port: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("`{port}` is no port: expected HOST:PORT"))
}

#[cfg(test)]
mod tests;
