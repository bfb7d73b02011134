//! What is answered: the page as it was made at most a moment ago.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::request::{RequestError, RequestHead};
use crate::Page;

/// A page is that old before it is made again,
const FRESH: Duration = Duration::from_secs(1);
/// and this many times as old as making it took.
const REST: u32 = 10;

/// Makes answers; one for all connections.
pub struct Responder {
    cached: Mutex<CachedPage>,
    /// The clock by which a page is old.
    now: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Whether only this machine can ask: then it must ask for this machine.
    is_loopback: bool,
}

struct CachedPage {
    render: Box<dyn FnMut() -> Page + Send>,
    /// Until then it is not made again.
    until: Instant,
    page: Arc<str>,
    content: Arc<str>,
    tag: String,
}

pub struct Response {
    status: &'static str,
    headers: String,
    body: Arc<str>,
}

impl Responder {
    pub fn new(render: impl FnMut() -> Page + Send + 'static, is_loopback: bool) -> Responder {
        Responder::with_clock(render, is_loopback, Instant::now)
    }

    /// The same by another clock, which tests turn themselves.
    pub(crate) fn with_clock(
        render: impl FnMut() -> Page + Send + 'static,
        is_loopback: bool,
        now: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Responder {
        let (render, empty): (Box<dyn FnMut() -> Page + Send>, Arc<str>) = (Box::new(render), "".into());
        let (page, content) = (empty.clone(), empty);
        let cached = CachedPage { render, until: now(), page, content, tag: String::new() };
        Responder { cached: Mutex::new(cached), now: Box::new(now), is_loopback }
    }

    pub(crate) fn respond_to(&self, head: &RequestHead) -> Response {
        if self.is_loopback && !head.host.as_deref().is_none_or(is_this_machine) {
            return Response::plain("421 Misdirected Request", "ask for this machine by its address");
        }
        if head.method != "GET" {
            let mut response = Response::plain("405 Method Not Allowed", "only GET is answered");
            response.headers += "Allow: GET\r\n";
            return response;
        }
        if !matches!(head.path.as_str(), "/" | "/live") {
            return Response::plain("404 Not Found", "there is only /");
        }
        // A page that could not be made would fail again; the next one may not.
        let mut cached = self.cached.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        cached.refresh(&*self.now);
        let headers = format!("Content-Type: text/html; charset=utf-8\r\nETag: {}\r\n", cached.tag);
        match head.path.as_str() {
            "/" => Response { status: "200 OK", headers, body: cached.page.clone() },
            _ if head.if_none_match.as_ref() == Some(&cached.tag) => {
                Response { status: "304 Not Modified", headers, body: "".into() }
            }
            _ => Response { status: "200 OK", headers, body: cached.content.clone() },
        }
    }
}

impl CachedPage {
    fn refresh(&mut self, now: &dyn Fn() -> Instant) {
        let begin = now();
        if begin < self.until {
            return;
        }
        let page = (self.render)();
        self.content = page.content().into();
        self.page = page.live_html().into();
        let mut hasher = DefaultHasher::new();
        self.content.hash(&mut hasher);
        self.tag = format!("\"{:016x}\"", hasher.finish());
        let end = now();
        self.until = end + FRESH.max(REST * (end - begin));
    }
}

impl Response {
    pub fn refusal(error: &RequestError) -> Response {
        match error {
            RequestError::TooLong => {
                Response::plain("431 Request Header Fields Too Large", "the request is too long")
            }
            RequestError::TimedOut => {
                Response::plain("408 Request Timeout", "the request did not come in time")
            }
            RequestError::Malformed | RequestError::HungUp => {
                Response::plain("400 Bad Request", "this is no request of HTTP/1")
            }
        }
    }

    fn plain(status: &'static str, text: &str) -> Response {
        let headers = "Content-Type: text/plain; charset=utf-8\r\n".into();
        Response { status, headers, body: format!("{text}\n").into() }
    }

    /// As they go over the wire. Nothing but what is on the page may be loaded or run by it.
    pub fn bytes(&self) -> Vec<u8> {
        let Response { status, headers, body } = self;
        let policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\
             Content-Security-Policy: {policy}\r\nConnection: close\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body.as_bytes());
        bytes
    }
}

/// Whether a host, with or without a port, is `localhost` or an address in numbers: a name of somebody else's
/// that he lets point here is neither.
fn is_this_machine(host: &str) -> bool {
    let is_address = |text: &str| text.parse::<IpAddr>().is_ok();
    let bare = match host.rsplit_once(':') {
        Some((bare, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => bare,
        _ => host,
    };
    let unbracketed = bare.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    bare == "localhost" || is_address(unbracketed.unwrap_or(bare)) || is_address(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_somebody_elses_is_not_this_machine() {
        for host in ["localhost", "localhost:8700", "127.0.0.1:8700", "[::1]:8700", "::1", "10.0.0.7"] {
            assert!(is_this_machine(host), "{host}");
        }
        for foreign in
            ["evil.example", "evil.example:8700", "localhost.evil.example", "", "127.0.0.1.evil.example:80"]
        {
            assert!(!is_this_machine(foreign), "{foreign}");
        }
    }
}
