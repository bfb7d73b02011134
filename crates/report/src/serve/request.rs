//! The head of a request: what of it matters here.

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
pub struct RequestHead {
    pub method: String,
    /// Without what stands behind a question mark.
    pub path: String,
    /// Whom it wants to talk to.
    pub host: Option<String>,
    /// What it has already.
    pub if_none_match: Option<String>,
}

/// Why there is none.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestError {
    /// It is no request of HTTP/1.
    Malformed,
    /// Its head does not end.
    TooLong,
    /// It did not come in time.
    TimedOut,
    /// The client has hung up.
    HungUp,
}

impl RequestHead {
    /// Of the bytes before the empty line.
    pub fn parse(bytes: &[u8]) -> Result<RequestHead, RequestError> {
        let text = str::from_utf8(bytes).map_err(|_| RequestError::Malformed)?;
        let mut lines = text.split("\r\n");
        let fields: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
        let [method, target, "HTTP/1.0" | "HTTP/1.1"] = fields[..] else {
            return Err(RequestError::Malformed);
        };
        let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
        if !is_method || !target.starts_with('/') || target.contains(|c: char| c.is_control()) {
            return Err(RequestError::Malformed);
        }
        let path = target.split('?').next().unwrap_or_default();
        let mut head =
            RequestHead { method: method.into(), path: path.into(), host: None, if_none_match: None };
        for line in lines {
            let (name, value) = line.split_once(':').ok_or(RequestError::Malformed)?;
            match name.to_ascii_lowercase().as_str() {
                "host" => head.host = Some(value.trim().to_ascii_lowercase()),
                "if-none-match" => head.if_none_match = Some(value.trim().into()),
                _ => {}
            }
        }
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_its_path_and_what_the_client_has() {
        let head = RequestHead::parse(
            b"GET /live?x=1 HTTP/1.1\r\nHost: LocalHost:8700\r\nif-none-match: \"3\"\r\nA: b",
        )
        .unwrap();
        assert_eq!((head.method.as_str(), head.path.as_str()), ("GET", "/live"));
        assert_eq!(
            (head.host.as_deref(), head.if_none_match.as_deref()),
            (Some("localhost:8700"), Some("\"3\""))
        );
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let garbage: [&[u8]; 9] = [
            b"",
            b"GET",
            b"GET /",
            b"GET / HTTP/2.0",
            b"get / HTTP/1.1",
            b"GET http://elsewhere/ HTTP/1.1",
            b"GET / HTTP/1.1\r\nno colon",
            b"\x16\x03\x01\x02\x00",
            b"GET /\xff HTTP/1.1",
        ];
        for bytes in garbage {
            assert_eq!(RequestHead::parse(bytes), Err(RequestError::Malformed), "{bytes:?}");
        }
    }
}
