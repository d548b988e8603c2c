//! A request, and which part of the hub it asks for.

use std::io::{self, BufRead, Read};

/// No honest client's request is longer, in bytes.
const LONGEST: u64 = 64 << 10;

/// Which part of the hub a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A model's information.
    Info,
    /// A file tree.
    Tree,
    /// A file at the hub: itself, or a redirect.
    Resolve,
    /// A file at the blob host.
    Blob,
    /// Nothing that there is.
    Unknown,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Request {
    /// `GET`, `HEAD`, ….
    pub method: String,
    /// The path without the query, still percent-encoded.
    pub path: String,
    /// Which part of the hub it asks for.
    pub endpoint: Endpoint,
    /// The path in the repository of the file that is asked for; empty for other requests.
    pub file: String,
    /// The number of the request, from 0, in the order of arrival.
    pub number: usize,
    pub(crate) segments: Vec<String>,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
}

impl Request {
    /// The next request of a connection; `None` at its end.
    pub(crate) fn read(reader: &mut impl BufRead, blob_host: bool) -> io::Result<Option<Self>> {
        let mut reader = reader.take(LONGEST);
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a request");
        let mut words = line.split_ascii_whitespace();
        let (method, target) = words.next().zip(words.next()).ok_or_else(invalid)?;
        let mut request = Self::new(method, target, blob_host);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Err(invalid());
            }
            let line = line.trim_end();
            if line.is_empty() {
                return Ok(Some(request));
            }
            let (name, value) = line.split_once(':').ok_or_else(invalid)?;
            request.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    fn new(method: &str, target: &str, blob_host: bool) -> Self {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let segments: Vec<String> = path.trim_start_matches('/').split('/').map(decoded).collect();
        let query: Vec<_> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (decoded(name), decoded(value)))
            .collect();
        let names: Vec<&str> = segments.iter().map(String::as_str).collect();
        let (endpoint, file) = match &names[..] {
            [_, _, _] if blob_host => {
                (Endpoint::Blob, found(&query, "filename").unwrap_or_default().to_owned())
            }
            _ if blob_host => (Endpoint::Unknown, String::new()),
            ["api", "resolve-cache", "models", _, _, _, file @ ..] => (Endpoint::Resolve, file.join("/")),
            ["api", "models", _, _] | ["api", "models", _, _, "revision", _] => {
                (Endpoint::Info, String::new())
            }
            ["api", "models", _, _, "tree", _, ..] => (Endpoint::Tree, String::new()),
            [_, _, "resolve", _, file @ ..] => (Endpoint::Resolve, file.join("/")),
            _ => (Endpoint::Unknown, String::new()),
        };
        let (method, path) = (method.to_owned(), path.to_owned());
        Self { method, path, endpoint, file, number: 0, segments, query, headers: Vec::new() }
    }

    /// A header's value, by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        found(&self.headers, name)
    }

    /// A value of the query.
    pub fn query(&self, name: &str) -> Option<&str> {
        found(&self.query, name)
    }

    /// Whether it asks for the bytes of this file where they are: at the blob host, or at the hub for a file that is
    /// not in Git LFS.
    pub fn wants(&self, file: &str) -> bool {
        self.method == "GET"
            && self.file == file
            && matches!(self.endpoint, Endpoint::Blob | Endpoint::Resolve)
    }

    /// The token that came along.
    pub(crate) fn token(&self) -> Option<&str> {
        self.header("authorization")?.strip_prefix("Bearer ")
    }

    pub(crate) fn set_header(&mut self, name: &str, value: Option<String>) {
        self.headers.retain(|(known, _)| known != name);
        self.headers.extend(value.map(|value| (name.to_owned(), value)));
    }
}

fn found<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    pairs.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..2).and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        match code.filter(|_| *first == b'%') {
            Some(code) => {
                bytes.push(code);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The text as one segment of a path, or one value of a query.
pub(crate) fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
