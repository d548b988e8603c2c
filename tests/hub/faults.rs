//! Every fault by itself, and what comes of it.

use std::{fs, time::Duration};

use viaduct::hub::HubError;
use viaduct_hub_server::{Endpoint, Fault, Repository, Request, noise};

use crate::place::{Files, ID, Place, repository};

const SIZE: usize = 300_000;
const WHOLE: u64 = SIZE as u64;
const FILE: &str = "weights.safetensors";
const ALWAYS: usize = usize::MAX;

fn files() -> Files {
    Files::from([(FILE.into(), noise(3, SIZE))])
}

type Matches = fn(&Request) -> bool;

fn body(request: &Request) -> bool {
    request.endpoint == Endpoint::Blob
}

fn resumed(request: &Request) -> bool {
    body(request) && request.header("range").is_some()
}

fn redirect(request: &Request) -> bool {
    request.endpoint == Endpoint::Resolve
}

fn listing(request: &Request) -> bool {
    request.endpoint == Endpoint::Info
}

fn header(name: &'static str, value: &str) -> Fault {
    Fault::Header(name, Some(value.to_owned()))
}

/// A place where these rules hold, one after the other.
fn place(rules: Vec<(Vec<Fault>, usize, Matches)>) -> Place {
    let place = Place::new(&files());
    for (faults, times, matches) in rules {
        place.server.fail(faults, times, matches);
    }
    place
}

/// The whole file comes in spite of it, in so many bytes by the server's count (`None`: the client ends a body early,
/// and how much was on its way then is chance), and with these ranges.
fn recovers(rules: Vec<(Vec<Fault>, usize, Matches)>, bytes: Option<u64>, ranges: &[Option<&str>]) {
    let told = format!("{:?}", rules.iter().map(|(faults, times, _)| (faults, times)).collect::<Vec<_>>());
    let place = place(rules);
    place.watched(|| place.pull()).unwrap_or_else(|error| panic!("{told}: {error}"));
    place.assert_whole();
    if let Some(bytes) = bytes {
        assert_eq!(place.server.file_bytes(), bytes, "{told}");
    }
    let asked: Vec<Option<String>> = place.bodies(0).into_iter().map(|(_, range)| range).collect();
    assert_eq!(asked.iter().map(Option::as_deref).collect::<Vec<_>>(), ranges, "{told}");
}

/// It ends in an error that says this, nothing has a final name, and all is well once the hub is: only what was missing
/// comes then.
fn fails(rules: Vec<(Vec<Fault>, usize, Matches)>, says: &[&str]) {
    let told = format!("{:?}", rules.iter().map(|(faults, times, _)| (faults, times)).collect::<Vec<_>>());
    let place = place(rules);
    let error = place.watched(|| place.pull()).expect_err(&told).to_string();
    assert!(says.iter().all(|text| error.contains(text)), "{told}: {error}");
    assert!(!place.blob(FILE).exists(), "{told}");
    let (there, before) = (place.there(FILE), place.server.served().len());
    place.server.heal();
    place.pull().unwrap();
    place.assert_whole();
    assert_eq!(place.server.file_bytes_since(before), WHOLE - there, "{told}");
}

const REST: Option<&str> = Some("bytes=180000-");

#[test]
fn bodies_that_end_early_are_gone_on_with() {
    for fault in [Fault::Cut(0.6), Fault::Reset(0.6)] {
        recovers(vec![(vec![fault], 1, body)], Some(WHOLE), &[None, REST]);
    }
    // Nothing but the size in the listing tells that these are not whole.
    for framing in [Fault::NoLength, Fault::Chunked] {
        recovers(vec![(vec![framing.clone(), Fault::Cut(0.6)], 1, body)], Some(WHOLE), &[None, REST]);
        recovers(vec![(vec![framing], 1, body)], Some(WHOLE), &[None]);
    }
    let ranges = [None, Some("bytes=150000-"), Some("bytes=225000-"), Some("bytes=262500-")];
    recovers(vec![(vec![Fault::Cut(0.5)], 3, body)], Some(WHOLE), &ranges);
    fails(
        vec![(vec![Fault::Cut(0.6)], 1, body), (vec![Fault::Cut(0.0)], ALWAYS, body)],
        &[FILE, "the connection ended 120000 bytes early", "4 attempts", "what is downloaded stays"],
    );
}

#[test]
fn ranges_that_are_not_kept_are_noticed() {
    let cut = || (vec![Fault::Cut(0.6)], 1, body as Matches);
    // The body begins at the beginning: nothing may be appended.
    recovers(vec![cut(), (vec![Fault::IgnoreRange], 1, resumed)], Some(180_000 + WHOLE), &[None, REST]);
    // Refused, although it is inside the file: the beginning may be wrong, so it comes anew.
    recovers(vec![cut(), (vec![Fault::NotSatisfiable], 1, resumed)], Some(180_000 + WHOLE), &[None, None]);
    for wrong in [
        Fault::RangeFrom(7),
        header("Content-Range", "bytes 0-119999/300000"),
        header("Content-Range", "bytes 180000-299999/300001"),
        header("Content-Range", "bytes 99999999999999999999-/-"),
        header("Content-Range", ""),
        Fault::Header("Content-Range", None),
    ] {
        recovers(vec![cut(), (vec![wrong.clone()], 1, resumed)], None, &[None, REST, REST]);
        fails(
            vec![cut(), (vec![wrong], ALWAYS, resumed)],
            &[FILE, "asked for bytes from 180000 of 300000, the server sends"],
        );
    }
    let never = (vec![Fault::IgnoreRange, Fault::Cut(0.6)], ALWAYS, body as Matches);
    fails(vec![never], &[FILE, "the connection ended 120000 bytes early"]);
}

#[test]
fn lengths_that_lie_are_not_believed() {
    for length in ["5", "0", "999999999", "-1", "x"] {
        let (faults, chance) = (vec![header("X-Linked-Size", length)], Some(WHOLE));
        recovers(vec![(faults, ALWAYS, redirect)], chance, &[None]);
    }
    // What a redirect's own length is has nothing to do with the file.
    for length in ["5", "0", "999999999"] {
        recovers(vec![(vec![header("Content-Length", length)], 1, redirect)], Some(WHOLE), &[None]);
    }
    let short = vec![(vec![header("Content-Length", "5")], 1, body as Matches)];
    recovers(short, None, &[None, Some("bytes=5-")]);
    recovers(vec![(vec![header("Content-Length", "400000")], 1, body)], Some(WHOLE), &[None]);
}

#[test]
fn bytes_that_are_not_the_files_are_brought_again() {
    for fault in [Fault::Flip(0.0), Fault::Flip(0.5), Fault::Flip(1.0), Fault::Changed] {
        recovers(vec![(vec![fault.clone()], 1, body)], Some(2 * WHOLE), &[None, None]);
        fails(
            vec![(vec![fault.clone()], ALWAYS, body)],
            &[FILE, "another hash than the hub states", "removed"],
        );
        let cut = (vec![Fault::Cut(0.6)], 1, body as Matches);
        recovers(vec![cut, (vec![fault], 1, resumed)], Some(2 * WHOLE), &[None, REST, None]);
    }
}

#[test]
fn a_file_that_is_another_one_now_is_not_taken() {
    let other = || header("X-Linked-Etag", &format!("\"{}\"", "0".repeat(64)));
    recovers(vec![(vec![other()], 1, redirect)], None, &[None, None]);
    fails(vec![(vec![other()], ALWAYS, redirect)], &[FILE, "the hub names content 000"]);
    // The blob host names things as it likes.
    recovers(vec![(vec![header("ETag", "\"x\"")], 1, body)], Some(WHOLE), &[None]);
    recovers(vec![(vec![Fault::Header("ETag", None)], 1, body)], Some(WHOLE), &[None]);
}

#[test]
fn servers_that_fail_are_asked_again() {
    let says = ["cannot be asked", "4 attempts", "4 attempts"];
    for (endpoint, says) in ([listing, redirect, body] as [Matches; 3]).into_iter().zip(says) {
        for status in [500, 502, 503, 504, 408, 599] {
            recovers(vec![(vec![Fault::Status(status)], 2, endpoint)], Some(WHOLE), &[None]);
        }
        for fault in [Fault::ResetBeforeAnswer, Fault::NotHttp, Fault::Hang(Duration::from_millis(5))] {
            recovers(vec![(vec![fault], 2, endpoint)], Some(WHOLE), &[None]);
        }
        fails(vec![(vec![Fault::Status(503)], ALWAYS, endpoint)], &[ID, "503", says]);
        fails(vec![(vec![Fault::ResetBeforeAnswer], ALWAYS, endpoint)], &[ID, "http://127.0.0.1", says]);
    }
    // The address at the blob host has expired; the hub gives another one.
    for status in [401, 403] {
        recovers(vec![(vec![Fault::Status(status)], 1, body)], Some(WHOLE), &[None]);
    }
    fails(vec![(vec![Fault::Status(403)], ALWAYS, body)], &[FILE, "the host of the file answered 403"]);
    fails(vec![(vec![Fault::Status(404)], ALWAYS, body)], &[FILE, "404"]);
}

#[test]
fn who_asks_too_often_waits() {
    for endpoint in [listing, redirect, body] as [Matches; 3] {
        for wait in ["0", "", "Fri, 31 Dec 2100 23:59:59 GMT", "-3"] {
            recovers(vec![(vec![Fault::TooManyRequests(wait.into())], 2, endpoint)], Some(WHOLE), &[None]);
        }
        fails(vec![(vec![Fault::TooManyRequests("0".into())], ALWAYS, endpoint)], &[ID, "too many requests"]);
        // What the hub itself says where others have `Retry-After`.
        let limit = || vec![Fault::Status(429), header("RateLimit", "\"api\";r=0;t=3600")];
        fails(vec![(limit(), ALWAYS, endpoint)], &[ID, "asks to wait 3600 s"]);
        let long = || Fault::TooManyRequests("3600".into());
        let says = [ID, "asks to wait 3600 s", "too many requests", "HF_TOKEN", "what is downloaded stays"];
        fails(vec![(vec![long()], ALWAYS, endpoint)], &says);
        let place = place(vec![(vec![long()], ALWAYS, endpoint)]);
        assert!(matches!(place.pull(), Err(HubError::RateLimited { .. })));
        let refused = place.server.served().iter().filter(|served| served.status == 429).count();
        assert_eq!(refused, 1, "nobody waits an hour");
    }
}

#[test]
fn redirects_lead_to_files_or_to_errors() {
    for location in [None, Some("ftp://x/y"), Some("file:///etc/passwd"), Some("\u{7f}"), Some("")] {
        let broken = || Fault::Header("Location", location.map(str::to_owned));
        recovers(vec![(vec![broken()], 1, redirect)], Some(WHOLE), &[None]);
        fails(vec![(vec![broken()], ALWAYS, redirect)], &[FILE, "4 attempts"]);
    }
    let around = format!("/{ID}/resolve/main/{FILE}");
    fails(vec![(vec![header("Location", &around)], ALWAYS, redirect)], &[FILE, "redirections"]);
    let cached = Files::from([("config.json".into(), b"{}".to_vec())]);
    let place = Place::serving(&cached, repository(&cached).cached_redirects());
    place.pull().unwrap();
    place.assert_whole();
}

#[test]
fn slow_servers_are_waited_for_and_silent_ones_are_not() {
    recovers(vec![(vec![Fault::Drip(10_000, Duration::from_millis(2))], 1, body)], Some(WHOLE), &[None]);
    for endpoint in [listing, redirect, body] as [Matches; 3] {
        let mut place = place(vec![(vec![Fault::Hang(Duration::from_secs(3600))], 1, endpoint)]);
        place.settings.patience.answer = Duration::from_millis(300);
        place.pull().unwrap();
        place.assert_whole();
    }
    // A body that stands still in the middle: what has come stays.
    let mut place = place(vec![(vec![Fault::Drip(200_000, Duration::from_secs(3600))], 1, body)]);
    place.settings.patience.answer = Duration::from_millis(500);
    place.pull().unwrap();
    place.assert_whole();
    assert_eq!(place.bodies(0)[1].1.as_deref(), Some("bytes=200000-"));
}

#[test]
fn listings_that_break_are_asked_for_again() {
    for fault in [Fault::Cut(0.5), Fault::Reset(0.5)] {
        recovers(vec![(vec![fault], 2, listing)], Some(WHOLE), &[None]);
    }
    for framing in [Fault::NoLength, Fault::Chunked] {
        recovers(vec![(vec![framing], 1, listing)], Some(WHOLE), &[None]);
    }
    fails(
        vec![(vec![Fault::NoLength, Fault::Cut(0.5)], ALWAYS, listing)],
        &[ID, "list of files cannot be used"],
    );
}

#[test]
fn a_hub_that_is_off_is_named() {
    let mut place = Place::new(&files());
    place.server.stop();
    let error = place.pull().unwrap_err().to_string();
    assert!(error.contains(&place.settings.endpoint) && error.contains("check the network"), "{error}");
    place.server.restart().unwrap();
    place.pull().unwrap();
    place.assert_whole();
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let files = files();
    let mut place = Place::serving(&files, repository(&files).private("hf_secret"));
    let refused = |place: &Place| place.pull().unwrap_err().to_string();
    let says = "no such repository";
    assert!(refused(&place).contains(says) && refused(&place).contains("HF_TOKEN"));
    place.settings.token = Some("hf_other".into());
    assert!(refused(&place).contains(says));
    place.settings.token = Some("hf_secret".into());
    place.pull().unwrap();
    place.assert_whole();
    for served in place.server.served().iter().filter(|served| matches!(served.status, 200 | 302)) {
        assert_eq!(served.authorised, served.endpoint != Endpoint::Blob, "{served:?}");
    }

    let mut place = Place::serving(&files, repository(&files).gated("hf_secret"));
    for token in [None, Some("hf_other")] {
        place.settings.token = token.map(str::to_owned);
        let error = place.pull().unwrap_err();
        assert!(matches!(error, HubError::Gated { .. }), "{error}");
        assert!(error.to_string().contains("accept the terms on") && error.to_string().contains("HF_TOKEN"));
    }
    place.settings.token = Some("hf_secret".into());
    place.pull().unwrap();
    place.assert_whole();
}

/// Nor by way of the list of files, to another port of the same host.
#[test]
fn the_token_follows_no_redirection() {
    let files = files();
    let mut place = Place::serving(&files, repository(&files).private("hf_secret"));
    place.settings.token = Some("hf_secret".into());
    place.pull().unwrap();
    // Where the large files are.
    let elsewhere = format!("{}/api/models/{ID}/revision/main", place.server.blobs_url());
    let before = place.server.served().len();
    place.server.fail([Fault::Status(307), header("Location", &elsewhere)], ALWAYS, listing);
    place.pull().unwrap_err();
    let served = &place.server.served()[before..];
    assert!(served.iter().any(|served| served.status == 307 && served.authorised), "{served:?}");
    let others: Vec<_> = served.iter().filter(|served| served.endpoint != Endpoint::Info).collect();
    assert!(!others.is_empty() && others.iter().all(|served| !served.authorised), "{served:?}");
}

/// A server that never lets a transfer end is left after some attempts, not asked for ever.
#[test]
fn what_does_not_get_further_ends() {
    fails(
        vec![(vec![Fault::NotSatisfiable], ALWAYS, resumed), (vec![Fault::Cut(0.6)], ALWAYS, body)],
        &[FILE, "4 attempts"],
    );
    fails(vec![(vec![Fault::IgnoreRange, Fault::Cut(0.6)], ALWAYS, body)], &[FILE, "4 attempts"]);
}

#[test]
fn a_commit_is_that_commit() {
    let place = Place::new(&files());
    let other = "0123456789".repeat(4);
    place.server.add(repository(&files()).tag(&other));
    let output = crate::bad::finish(place.program(&format!("pull {ID}@{other} --all")));
    let told = crate::bad::text(&output.stderr);
    assert!(output.status.code() == Some(1) && told.contains("it is of commit"), "{told}");
}

#[test]
fn one_content_under_two_names_comes_once() {
    let files =
        Files::from([("a".into(), noise(1, SIZE)), ("b/c".into(), noise(1, SIZE)), ("d".into(), vec![])]);
    let place = Place::new(&files);
    place.watched(|| place.pull()).unwrap();
    place.assert_whole();
    assert_eq!(place.server.file_bytes(), WHOLE);
}

/// What other tools left under final names is not believed when its size is wrong, and what they left of a transfer is
/// checked.
#[test]
fn what_others_left_is_looked_at() {
    let wrong: [(bool, Vec<u8>); 5] = [
        (true, noise(3, SIZE)[..180_000].to_vec()),
        (true, vec![]),
        (false, noise(4, 180_000)),
        (false, noise(4, SIZE)),
        (false, noise(4, SIZE + 1)),
    ];
    for (is_final, bytes) in wrong {
        let place = Place::new(&files());
        let path = if is_final { place.blob(FILE) } else { place.incomplete(FILE) };
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &bytes).unwrap();
        place.pull().unwrap();
        place.assert_whole();
    }
    let place = Place::new(&files());
    fs::create_dir_all(place.blob(FILE).parent().unwrap()).unwrap();
    fs::write(place.incomplete(FILE), &noise(3, SIZE)[..123_456]).unwrap();
    assert_eq!(place.pull().unwrap(), WHOLE - 123_456);
    place.assert_whole();
    assert_eq!(place.server.file_bytes(), WHOLE - 123_456);
    // Whole, and only its name was missing.
    fs::rename(place.blob(FILE), place.incomplete(FILE)).unwrap();
    assert_eq!(place.pull().unwrap(), 0);
    place.assert_whole();
}

#[test]
fn revisions_that_are_not_there_are_named() {
    let place = Place::serving(&files(), repository(&files()).tag("v1"));
    let list = |revision: &str| {
        let hub = viaduct::hub::Hub::new(place.settings.clone(), Default::default()).unwrap();
        hub.list(&format!("{ID}@{revision}").parse().unwrap(), &|_| ())
    };
    let commit = list("v1").unwrap().commit;
    assert_eq!(list(&commit).unwrap().commit, commit);
    let error = list("refs/pr/7").unwrap_err().to_string();
    assert!(error.contains("no revision 'refs/pr/7'"), "{error}");
    place.server.add(Repository::new(ID));
    let hub = viaduct::hub::Hub::new(place.settings.clone(), Default::default()).unwrap();
    let error = hub.list(&"someone/else".parse().unwrap(), &|_| ()).unwrap_err().to_string();
    assert!(error.contains("someone/else") && error.contains("no such repository"), "{error}");
}
