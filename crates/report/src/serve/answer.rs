//! What is answered: the page as it was made at most a moment ago.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::request::{Head, Wrong};
use crate::Page;

/// A page is that old before it is made again,
const FRESH: Duration = Duration::from_secs(1);
/// and this many times as old as making it took.
const REST: u32 = 10;

/// Makes answers; one for all connections.
pub struct Answers {
    made: Mutex<Made>,
    /// The clock by which a page is old.
    now: Box<dyn Fn() -> Instant + Send + Sync>,
    /// Whether only this machine can ask: then it must ask for this machine.
    is_loopback: bool,
}

struct Made {
    render: Box<dyn FnMut() -> Page + Send>,
    /// Until then it is not made again.
    until: Instant,
    page: Arc<str>,
    content: Arc<str>,
    tag: String,
}

/// What goes back.
pub struct Answer {
    status: &'static str,
    headers: String,
    body: Arc<str>,
}

impl Answers {
    pub fn new(render: impl FnMut() -> Page + Send + 'static, is_loopback: bool) -> Answers {
        Answers::by_clock(render, is_loopback, Instant::now)
    }

    /// The same by another clock, which tests turn themselves.
    pub fn by_clock(
        render: impl FnMut() -> Page + Send + 'static,
        is_loopback: bool,
        now: impl Fn() -> Instant + Send + Sync + 'static,
    ) -> Answers {
        let (render, empty): (Box<dyn FnMut() -> Page + Send>, Arc<str>) = (Box::new(render), "".into());
        let (page, content) = (empty.clone(), empty);
        let made = Made { render, until: now(), page, content, tag: String::new() };
        Answers { made: Mutex::new(made), now: Box::new(now), is_loopback }
    }

    pub fn to(&self, head: &Head) -> Answer {
        if self.is_loopback && !head.host.as_deref().is_none_or(is_this_machine) {
            return Answer::plain("421 Misdirected Request", "ask for this machine by its address");
        }
        if head.method != "GET" {
            let mut answer = Answer::plain("405 Method Not Allowed", "only GET is answered");
            answer.headers += "Allow: GET\r\n";
            return answer;
        }
        if !matches!(head.path.as_str(), "/" | "/live") {
            return Answer::plain("404 Not Found", "there is only /");
        }
        // A page that could not be made would fail again; the next one may not.
        let mut made = self.made.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        made.refresh(&*self.now);
        let headers = format!("Content-Type: text/html; charset=utf-8\r\nETag: {}\r\n", made.tag);
        match head.path.as_str() {
            "/" => Answer { status: "200 OK", headers, body: made.page.clone() },
            _ if head.has.as_ref() == Some(&made.tag) => {
                Answer { status: "304 Not Modified", headers, body: "".into() }
            }
            _ => Answer { status: "200 OK", headers, body: made.content.clone() },
        }
    }
}

impl Made {
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

impl Answer {
    pub fn refusal(wrong: &Wrong) -> Answer {
        match wrong {
            Wrong::Long => Answer::plain("431 Request Header Fields Too Large", "the request is too long"),
            Wrong::Slow => Answer::plain("408 Request Timeout", "the request did not come in time"),
            Wrong::Garbage | Wrong::Gone => Answer::plain("400 Bad Request", "this is no request of HTTP/1"),
        }
    }

    fn plain(status: &'static str, words: &str) -> Answer {
        let headers = "Content-Type: text/plain; charset=utf-8\r\n".into();
        Answer { status, headers, body: format!("{words}\n").into() }
    }

    /// As they go over the wire. Nothing but what is on the page may be loaded or run by it.
    pub fn bytes(&self) -> Vec<u8> {
        let Answer { status, headers, body } = self;
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

/// Whether a host, with or without a port, is `localhost` or an address in numbers: a name of somebody else's that he lets point
/// here is neither.
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
        for own in ["localhost", "localhost:8700", "127.0.0.1:8700", "[::1]:8700", "::1", "10.0.0.7"] {
            assert!(is_this_machine(own), "{own}");
        }
        for foreign in
            ["evil.example", "evil.example:8700", "localhost.evil.example", "", "127.0.0.1.evil.example:80"]
        {
            assert!(!is_this_machine(foreign), "{foreign}");
        }
    }
}
