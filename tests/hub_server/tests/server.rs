//! The server against raw sockets, and against the client whose word counts: Python's `huggingface_hub`.

#[path = "../../support/python.rs"]
#[allow(dead_code, reason = "it also runs scripts")]
mod python;

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::PathBuf,
    process::Command,
    time::Duration,
};

use serde_json::Value;
use viaduct_hub_server::{Endpoint, Fault, HubServer, Repository, Request, noise};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn repository() -> Repository {
    Repository::new("someone/model")
        .license("apache-2.0")
        .file("config.json", "{\"a\": 1}\n")
        .file("deep/er/notes ü.txt", "notes")
        .lfs("weights.safetensors", noise(1, 300_000))
}

fn serve(repository: Repository) -> HubServer {
    let server = HubServer::start().unwrap();
    server.add(repository);
    server
}

/// What came, as it came: status, headers and body. Everything until the connection ended or failed.
struct Got {
    status: u16,
    head: String,
    body: Vec<u8>,
    failed: bool,
}

impl Got {
    fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// `path` may be a whole URL, as redirects have it.
fn ask(server: &HubServer, method: &str, path: &str, headers: &str) -> Got {
    let url = if path.starts_with('/') { server.url() + path } else { path.to_owned() };
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "{method} /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n")
        .unwrap();
    let (mut bytes, mut block) = (Vec::new(), vec![0; 65536]);
    let mut failed = false;
    loop {
        match stream.read(&mut block) {
            Ok(0) => break,
            Ok(count) => bytes.extend(&block[..count]),
            Err(_) => {
                failed = true;
                break;
            }
        }
    }
    let Some(end) = end_of_head(&bytes) else {
        return Got { status: 0, head: String::new(), body: bytes, failed };
    };
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Got { status, head, body: bytes[end..].to_vec(), failed }
}

fn end_of_head(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .map(|at| at + 4)
        .filter(|_| bytes.starts_with(b"HTTP/"))
}

const CONFIG: &str = "/someone/model/resolve/main/config.json";
const WEIGHTS: &str = "/someone/model/resolve/main/weights.safetensors";

fn weights_url(server: &HubServer) -> String {
    ask(server, "HEAD", WEIGHTS, "").header("Location").unwrap().to_owned()
}

#[test]
fn files_are_served_at_the_hub_or_by_redirect() {
    let server = serve(repository());
    let commit = repository().commit();
    let small = ask(&server, "GET", CONFIG, "");
    assert_eq!((small.status, &small.body[..]), (200, &b"{\"a\": 1}\n"[..]));
    assert_eq!(small.header("X-Repo-Commit"), Some(commit.as_str()));
    // `printf '{"a": 1}\n' | git hash-object --stdin`
    assert_eq!(small.header("ETag"), Some("\"cb5b2f69babc53f9145b45ad20b9a075d48717ef\""));
    let coded =
        ask(&server, "GET", &format!("/someone/model/resolve/{commit}/deep/er/notes%20%C3%BC.txt"), "");
    assert_eq!(coded.body, b"notes");

    let redirect = ask(&server, "HEAD", WEIGHTS, "Authorization: Bearer x\r\n");
    assert_eq!((redirect.status, redirect.header("X-Linked-Size")), (302, Some("300000")));
    let length: usize = redirect.header("Content-Length").unwrap().parse().unwrap();
    assert!(length < 300, "a redirect's length is that of its own text: {length}");
    let sha256 = viaduct_hub_server::Content::from(noise(1, 300_000)).sha256().unwrap();
    assert_eq!(redirect.header("X-Linked-Etag"), Some(format!("\"{sha256}\"").as_str()));
    let blob = ask(&server, "GET", redirect.header("Location").unwrap(), "");
    assert!(blob.status == 200 && blob.body == noise(1, 300_000));
    let served = server.served();
    assert!(served[2].authorised && !served[3].authorised);
    assert_eq!((served[3].endpoint, served[3].body_bytes), (Endpoint::Blob, 300_000));
    assert_eq!(served[3].file, "weights.safetensors");

    let server = serve(repository().cached_redirects());
    let redirect = ask(&server, "GET", CONFIG, "");
    assert_eq!(redirect.status, 307);
    assert_eq!(ask(&server, "GET", redirect.header("Location").unwrap(), "").body, b"{\"a\": 1}\n");
}

#[test]
fn ranges_are_those_asked_for() {
    let server = serve(repository());
    let url = weights_url(&server);
    let all = noise(1, 300_000);
    for (range, first, last) in [("0-0", 0, 0), ("299999-", 299_999, 299_999), ("-5", 299_995, 299_999)] {
        let got = ask(&server, "GET", &url, &format!("Range: bytes={range}\r\n"));
        assert_eq!(got.status, 206);
        assert_eq!(got.header("Content-Range"), Some(format!("bytes {first}-{last}/300000").as_str()));
        assert_eq!(got.body, all[first..=last]);
    }
    assert_eq!(ask(&server, "GET", &url, "Range: bytes=300000-\r\n").status, 416);
    let compressed = ask(&server, "GET", &url, "Range: bytes=5-\r\nAccept-Encoding: gzip, br\r\n");
    assert_eq!((compressed.status, compressed.header("Content-Range")), (200, None));
    let etag = ask(&server, "HEAD", &url, "").header("ETag").unwrap().to_owned();
    for (etag, status) in [(etag.as_str(), 206), ("\"other\"", 200)] {
        let got = ask(&server, "GET", &url, &format!("Range: bytes=5-\r\nIf-Range: {etag}\r\n"));
        assert_eq!(got.status, status);
    }
}

#[test]
fn listings_have_pages_and_revisions() {
    let old = repository().tag("v1").commit();
    let server = serve(repository().tag("v1").file("new.txt", "new").page(2));
    let info = ask(&server, "GET", "/api/models/someone/model/revision/v1?blobs=true", "").json();
    assert_eq!((info["sha"].as_str(), info["siblings"].as_array().unwrap().len()), (Some(old.as_str()), 3));
    assert_eq!(info["cardData"]["license"], "apache-2.0");
    assert_eq!(info["siblings"][2]["lfs"]["size"], 300_000);
    let mut next = "/api/models/someone/model/tree/main?recursive=true".to_owned();
    let mut paths = Vec::new();
    loop {
        let page = ask(&server, "GET", &next, "");
        let entries = page.json();
        assert!(entries.as_array().unwrap().len() <= 2);
        paths.extend(
            entries.as_array().unwrap().iter().map(|entry| entry["path"].as_str().unwrap().to_owned()),
        );
        let Some(link) = page.header("Link") else { break };
        next = link.strip_prefix('<').unwrap().split_once(">; rel=\"next\"").unwrap().0.to_owned();
    }
    let all = ["config.json", "deep", "deep/er", "deep/er/notes ü.txt", "new.txt", "weights.safetensors"];
    assert_eq!(paths, all);
    let folder = ask(&server, "GET", "/api/models/someone/model/tree/main/deep", "").json();
    assert_eq!((folder.as_array().unwrap().len(), folder[0]["path"].as_str()), (1, Some("deep/er")));
}

#[test]
fn refusals_say_why() {
    let server = serve(repository());
    server.add(Repository::new("a/gated").gated("hf_right").file("f", "f"));
    server.add(Repository::new("a/private").private("hf_right").file("f", "f"));
    let token = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let (right, wrong) = (token("hf_right"), token("hf_wrong"));
    let cases = [
        ("/api/models/no/thing", "", 401, Some("RepoNotFound")),
        ("/api/models/no/thing", right.as_str(), 404, Some("RepoNotFound")),
        ("/api/models/someone/model/revision/v9", "", 404, Some("RevisionNotFound")),
        ("/someone/model/resolve/main/no", "", 404, Some("EntryNotFound")),
        ("/api/models/a/gated", "", 200, None),
        ("/a/gated/resolve/main/f", "", 401, Some("GatedRepo")),
        ("/a/gated/resolve/main/f", &wrong, 403, Some("GatedRepo")),
        ("/a/gated/resolve/main/f", &right, 200, None),
        ("/api/models/a/private", "", 401, Some("RepoNotFound")),
        ("/api/models/a/private", &wrong, 404, Some("RepoNotFound")),
        ("/a/private/resolve/main/f", &right, 200, None),
    ];
    for (path, headers, status, code) in cases {
        let got = ask(&server, "GET", path, headers);
        assert_eq!((got.status, got.header("X-Error-Code")), (status, code), "{path} {headers}");
    }
}

#[test]
fn faults_hit_as_often_as_they_should() {
    let server = serve(repository());
    let url = weights_url(&server);
    let all = noise(1, 300_000);
    let hit = |fault: Fault, headers: &str| {
        server.fail([fault], 1, |request: &Request| request.endpoint == Endpoint::Blob);
        let got = ask(&server, "GET", &url, headers);
        let after = ask(&server, "GET", &url, headers);
        assert!(matches!(after.status, 200 | 206) && all.ends_with(&after.body), "only once");
        got
    };
    let bytes = || server.served().iter().rev().nth(1).unwrap().body_bytes;

    let got = hit(Fault::Cut(0.6), "");
    assert!(got.body == all[..180_000] && !got.failed && bytes() == 180_000);
    assert_eq!(got.header("Content-Length"), Some("300000"));
    let got = hit(Fault::Reset(0.5), "");
    assert!(got.failed && bytes() == 150_000, "{}", bytes());
    let got = hit(Fault::ResetBeforeAnswer, "");
    assert!(got.failed && got.status == 0);
    let got = hit(Fault::Hang(Duration::from_millis(20)), "");
    assert!(!got.failed && got.body.is_empty() && got.status == 0);
    let got = hit(Fault::Drip(50_000, Duration::from_millis(1)), "");
    assert!(got.body == all);
    let got = hit(Fault::Flip(0.5), "");
    assert_eq!(got.body.iter().zip(&all).filter(|(a, b)| a != b).count(), 1);
    let got = hit(Fault::IgnoreRange, "Range: bytes=10-\r\n");
    assert!(got.status == 200 && got.body == all && got.header("Content-Range").is_none());
    let got = hit(Fault::RangeFrom(7), "Range: bytes=10-\r\n");
    assert_eq!((got.status, got.header("Content-Range")), (206, Some("bytes 7-299999/300000")));
    let got = hit(Fault::NotSatisfiable, "Range: bytes=10-\r\n");
    assert_eq!((got.status, got.header("Content-Range")), (416, Some("bytes */300000")));
    let got = hit(Fault::NoLength, "");
    assert!(got.body == all && got.header("Content-Length").is_none());
    let got = hit(Fault::Chunked, "");
    assert!(got.body.starts_with(b"40000\r\n") && got.body.ends_with(b"\r\n0\r\n\r\n"));
    let got = hit(Fault::Changed, "Range: bytes=10-\r\n");
    assert!(got.status == 206 && got.body[0] == !all[10]);
    let got = hit(Fault::Header("Content-Range", Some("bytes 0-1/2".into())), "Range: bytes=10-\r\n");
    assert_eq!(got.header("Content-Range"), Some("bytes 0-1/2"));
    let got = hit(Fault::Header("Content-Length", Some("5".into())), "");
    assert!(got.header("Content-Length") == Some("5") && got.body == all);
    assert_eq!(hit(Fault::Status(503), "").status, 503);
    let got = hit(Fault::TooManyRequests("3".into()), "");
    assert_eq!((got.status, got.header("Retry-After")), (429, Some("3")));
    assert_eq!(hit(Fault::NotHttp, "").status, 0);
    server.fail([Fault::NoLength, Fault::Cut(0.5)], 1, |_| true);
    let got = ask(&server, "GET", &url, "");
    assert!(got.body == all[..150_000] && got.header("Content-Length").is_none() && !got.failed);
}

#[test]
fn a_stopped_server_refuses_and_comes_back() {
    let mut server = serve(repository());
    let address = server.url().strip_prefix("http://").unwrap().to_owned();
    server.fail([Fault::Hang(Duration::from_secs(3600))], 1, |_| true);
    let mut hanging = TcpStream::connect(&address).unwrap();
    write!(hanging, "GET {CONFIG} HTTP/1.1\r\n\r\n").unwrap();
    while server.served().is_empty() {
        std::thread::yield_now();
    }
    server.stop();
    assert_eq!(hanging.read(&mut [0]).unwrap_or(0), 0);
    assert!(TcpStream::connect(&address).is_err());
    server.restart().unwrap();
    assert_eq!(ask(&server, "GET", CONFIG, "").status, 200);
}

/// `snapshot_download` and `hf_hub_download` find everything that they look for, and complain about nothing.
#[test]
fn pythons_client_is_served_without_a_warning() {
    const SCRIPT: &str = r#"
import sys, warnings
warnings.simplefilter("error")
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
folder = Path(snapshot_download(sys.argv[1]))
for path in sorted(folder.rglob("*")):
    if path.is_file():
        print(path.relative_to(folder), path.stat().st_size)
print(hf_hub_download(sys.argv[1], "config.json", revision="v1") == str(folder / "config.json"))
info = HfApi().model_info(sys.argv[1], files_metadata=True)
print(info.card_data.license, [(f.rfilename, f.size, f.lfs and f.lfs.size) for f in info.siblings][-1], info.gated)
"#;
    let Some(python) = python::python() else { return };
    for repository in [repository(), repository().cached_redirects(), repository().page(1)] {
        let server = serve(repository.tag("v1"));
        let home =
            std::env::temp_dir().join(format!("hub-server-{}", server.url().rsplit(':').next().unwrap()));
        let output = Command::new(&python)
            .args(["-c", SCRIPT, "someone/model"])
            .env("HF_ENDPOINT", server.url())
            .env("HF_HOME", &home)
            .env("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            .env_remove("HF_TOKEN")
            .env_remove("HF_HUB_OFFLINE")
            .env_remove("HF_HUB_CACHE")
            .output()
            .unwrap();
        drop(std::fs::remove_dir_all(&home));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "config.json 9\ndeep/er/notes ü.txt 5\nweights.safetensors 300000\nTrue\n\
             apache-2.0 ('weights.safetensors', 300000, 300000) False\n"
        );
        // It also asks for a list of programs that may have started it, and does without.
        let asked = server.served().into_iter().filter(|served| served.endpoint != Endpoint::Unknown);
        let refused = asked.into_iter().find(|served| !matches!(served.status, 200 | 302 | 307));
        assert!(refused.is_none(), "{refused:?}");
        assert_eq!(server.file_bytes(), 300_014);
    }
}
