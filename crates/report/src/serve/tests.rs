//! The server as a socket sees it.

use std::sync::atomic::AtomicU32;

use super::*;

/// A server on a port of its own.
fn started() -> SocketAddr {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let address = server.address();
    thread::spawn(move || server.run(counted(&Arc::new(AtomicU32::new(0)))));
    address
}

/// A page that says how often it was made.
fn counted(made: &Arc<AtomicU32>) -> impl FnMut() -> Page + Send + 'static {
    let made = made.clone();
    move || Page::new(format!("made {} times", made.fetch_add(1, Ordering::SeqCst) + 1))
}

/// What comes back for these bytes, as far as it comes within some seconds.
fn asked(address: SocketAddr, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    // A server that has heard enough may hang up before all is written.
    let _ = stream.write_all(bytes);
    let mut response = Vec::new();
    let _ = stream.read_to_end(&mut response);
    String::from_utf8(response).unwrap()
}

fn get(address: SocketAddr, path: &str) -> String {
    asked(address, format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())
}

fn status(response: &str) -> &str {
    response.split(' ').nth(1).unwrap_or_else(|| panic!("no answer: {response:?}"))
}

#[test]
fn the_page_and_its_content_are_all_there_is() {
    let address = started();
    let page = get(address, "/");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.contains("<!doctype html>"), "{page}");
    assert!(page.contains("fetch('live'") && page.contains("Content-Security-Policy: default-src 'none'"));
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    let content = get(address, "/live");
    assert!(content.contains("<h1>made ") && !content.contains("<!doctype"), "{content}");
    assert_eq!(status(&asked(address, b"GET / HTTP/1.0\r\n\r\n")), "200", "without a host, as HTTP/1.0 may");
    let tag = content.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap().to_owned();
    let again = format!("GET /live HTTP/1.1\r\nIf-None-Match: {tag}\r\n\r\n");
    // Within the second in which it is not made again, or after another one, of which the tag is another.
    let response = asked(address, again.as_bytes());
    let renewed = response.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap() != tag;
    assert_eq!(status(&response), if renewed { "200" } else { "304" }, "{response}");
}

#[test]
fn no_file_can_be_named() {
    let address = started();
    let paths = [
        "/../../etc/passwd",
        "/etc/passwd",
        "/%2e%2e/run.toml",
        "//",
        "/metrics.jsonl",
        "/live/",
        "/..",
        "/\\..\\x",
    ];
    for path in paths {
        let response = get(address, path);
        assert_eq!(status(&response), "404", "{path}");
        assert!(!response.contains("root:"), "{path}");
    }
}

#[test]
fn only_get_is_answered_and_only_for_this_machine() {
    let address = started();
    for method in ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"] {
        assert_eq!(
            status(&asked(address, format!("{method} / HTTP/1.1\r\n\r\n").as_bytes())),
            "405",
            "{method}"
        );
    }
    let foreign = asked(address, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    assert_eq!(status(&foreign), "421");
    assert!(!foreign.contains("made"), "{foreign}");
}

#[test]
fn garbage_is_refused_and_harms_nobody() {
    let address = started();
    for garbage in
        [&b"\r\n\r\n"[..], b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET / HTTP/9\r\n\r\n", &[0xff; 600]]
    {
        let mut bytes = garbage.to_vec();
        bytes.extend_from_slice(b"\r\n\r\n");
        assert_eq!(status(&asked(address, &bytes)), "400", "{garbage:?}");
    }
    assert_eq!(status(&get(address, "/")), "200");
}

#[test]
fn a_head_that_does_not_end_is_cut_off() {
    let address = started();
    let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(20_000));
    assert_eq!(status(&asked(address, long.as_bytes())), "431");
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(5_000));
    assert_eq!(status(&asked(address, many.as_bytes())), "431");
    let path = format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(100_000));
    assert_eq!(status(&asked(address, path.as_bytes())), "431");
    assert_eq!(status(&get(address, "/")), "200");
}

/// Connections that say nothing take every slot there is; those beyond are dropped at once, and when the
/// time of the silent ones is over there are slots again.
#[test]
fn clients_that_say_nothing_are_not_waited_for() {
    let address = started();
    let silent: Vec<TcpStream> = (0..CONNECTIONS + 8).map(|_| TcpStream::connect(address).unwrap()).collect();
    let begin = Instant::now();
    let response = loop {
        let response = get(address, "/");
        if !response.is_empty() || begin.elapsed() > 4 * ARRIVES_WITHIN {
            break response;
        }
        thread::sleep(Duration::from_millis(100));
    };
    assert_eq!(status(&response), "200");
    drop(silent);
}

/// However many ask, a page is made once in a second of the server's clock, which stands still here until it
/// is turned.
#[test]
fn a_flood_makes_no_more_pages() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let (address, made, clock) = (server.address(), Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (begin, turned) = (Instant::now(), clock.clone());
    let now = move || begin + Duration::from_millis(turned.load(Ordering::SeqCst).into());
    let responder = Responder::with_clock(counted(&made), true, now);
    thread::spawn(move || server.respond(responder));
    for (millis, expected) in [(0, 1), (999, 1), (1000, 2), (1999, 2), (60_000, 3)] {
        clock.store(millis, Ordering::SeqCst);
        // One that finds no slot, since the server's threads are behind, asks again.
        let ask = move || {
            let responses =
                std::iter::repeat_with(|| get(address, "/live")).filter(|response| !response.is_empty());
            responses.take(25).all(|response| response.contains(&format!("<h1>made {expected} times")))
        };
        let clients: Vec<_> = (0..8).map(|_| thread::spawn(ask)).collect();
        assert!(clients.into_iter().all(|client| client.join().unwrap()), "after {millis} ms");
        assert_eq!(made.load(Ordering::SeqCst), expected, "after {millis} ms");
    }
}

#[test]
fn a_page_that_cannot_be_made_is_no_end() {
    let server = Server::bind("127.0.0.1:0").unwrap();
    let address = server.address();
    let mut calls = 0;
    let render = move || {
        calls += 1;
        assert!(calls > 1, "the first fails");
        Page::new("well")
    };
    thread::spawn(move || server.run(render));
    assert_eq!(get(address, "/"), "", "its thread is gone");
    assert_eq!(status(&get(address, "/")), "200");
}

#[test]
fn an_address_may_leave_out_its_parts() {
    assert_eq!(split_address("9000"), ("127.0.0.1", "9000"));
    assert_eq!(split_address(":9000"), ("127.0.0.1", "9000"));
    assert_eq!(split_address("0.0.0.0"), ("0.0.0.0", "8700"));
    assert_eq!(split_address("node7:80"), ("node7", "80"));
    assert_eq!(split_address("[::1]:80"), ("::1", "80"));
    assert_eq!(split_address("::1"), ("::1", "8700"));
    assert!(Server::bind("127.0.0.1:port").unwrap_err().to_string().contains("`port` is no port"));
}
