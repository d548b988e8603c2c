//! Downloads that end early, lie, or begin anew. All ways to break a transfer are in `tests/hub`.

use std::fs;

use viaduct::hub::HubError;
use viaduct_hub_server::{Endpoint, Fault, Repository, Request, noise};

use crate::{
    DRAW,
    bad::{Good, finish, text},
    place::{Files, ID, Place, said},
};

const FILE: &str = "model.safetensors";
const SIZE: u64 = 300_000;
const ALWAYS: usize = usize::MAX;

fn place() -> Place {
    Place::new(&Files::from([(FILE.into(), noise(28, SIZE as usize))]))
}

fn body(request: &Request) -> bool {
    request.endpoint == Endpoint::Blob
}

fn redirect(request: &Request) -> bool {
    request.endpoint == Endpoint::Resolve
}

/// A download that was cut ends well, with a part of the file under its final name:
/// <https://github.com/huggingface/huggingface_hub/issues/4223>.
#[test]
fn bug_28_a_cut_download_does_not_end_well() {
    let place = place();
    // Without a length nothing but the listing tells that there is more.
    place.server.fail([Fault::NoLength, Fault::Cut(0.6)], 1, body);
    place.server.fail([Fault::Cut(0.0)], ALWAYS, body);
    let error = place.watched(|| place.pull()).unwrap_err();
    assert!(matches!(error, HubError::Transfer { .. }), "{error}");
    assert!(error.to_string().contains("120000 bytes early"), "{error}");
    assert!(!place.blob(FILE).exists());

    // Nor does one whose last byte is wrong.
    place.server.heal();
    place.server.fail([Fault::Flip(1.0)], ALWAYS, body);
    let output = finish(place.program(&format!("pull {ID} --all")));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("another hash"), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty() && !place.blob(FILE).exists());
}

/// What another tool left of a download under its final name passes for the file:
/// <https://github.com/unslothai/unsloth/issues/9602>.
#[test]
fn bug_28_a_part_under_a_final_name_is_completed() {
    let place = place();
    fs::create_dir_all(place.blob(FILE).parent().unwrap()).unwrap();
    fs::write(place.blob(FILE), &noise(28, SIZE as usize)[..180_000]).unwrap();
    assert_eq!(said(&finish(place.pull_program()))["transferred"], SIZE);
    place.assert_whole();
}

/// Without a hub, what is there of a model passes for the model:
/// <https://github.com/huggingface/huggingface_hub/issues/4779>.
#[test]
fn bug_28_a_part_of_a_model_is_none_without_a_hub() {
    let good = Good::bundle();
    let bundle = Repository::from_folder(ID, &good.copy().path().join("b")).unwrap();
    let place = Place::serving(&Files::new(), bundle);
    let draw = |offline: &str| {
        let mut command = place.program(&DRAW.replace("-b b", &format!("-b {ID}")));
        command.env("HF_HUB_OFFLINE", offline);
        let output = finish(command);
        (output.status.code(), text(&output.stderr))
    };
    let folder =
        said(&finish(place.program(&format!("pull {ID} --json"))))["path"].as_str().unwrap().to_owned();
    let weights = fs::canonicalize(format!("{folder}/transformer-00000.data")).unwrap();
    let whole = fs::read(&weights).unwrap();
    let harms: [&dyn Fn(); 3] = [
        &|| fs::write(&weights, &whole[..whole.len() * 6 / 10]).unwrap(),
        &|| fs::remove_file(&weights).unwrap(),
        &|| fs::remove_file(format!("{folder}/transformer-00000.data")).unwrap(),
    ];
    for harm in harms {
        harm();
        let (code, told) = draw("1");
        assert_eq!(code, Some(1), "{told}");
        assert!(told.contains("HF_HUB_OFFLINE") && told.contains("viaduct pull"), "{told}");
        // With a hub, the rest comes and the picture is drawn.
        let (code, told) = draw("0");
        assert_eq!(code, Some(0), "{told}");
        assert!(fs::read(&weights).unwrap() == whole);
        fs::remove_file(place.home.path().join("out.png")).unwrap();
    }
}

/// The length of a redirection is taken for the size of the file, and the download ends there:
/// <https://github.com/huggingface/hf-hub/issues/191>.
#[test]
fn bug_28_a_redirections_length_is_not_the_files() {
    for length in ["5", "1369"] {
        let place = place();
        place.server.fail([Fault::Header("Content-Length", Some(length.into()))], ALWAYS, redirect);
        place.pull().unwrap();
        place.assert_whole();
        assert_eq!(place.server.file_bytes(), SIZE);
    }
}

/// A transfer of gigabytes begins anew when the connection breaks: <https://github.com/huggingface/hf-hub/issues/196>.
#[test]
fn bug_28_a_broken_transfer_goes_on_where_it_was() {
    let place = place();
    place.server.fail([Fault::Reset(0.6)], 1, body);
    place.server.fail([Fault::ResetBeforeAnswer], ALWAYS, body);
    place.pull().unwrap_err();
    assert_eq!(place.there(FILE), 180_000);
    place.server.heal();
    let before = place.server.served().len();
    assert_eq!(said(&finish(place.pull_program()))["transferred"], SIZE - 180_000);
    place.assert_whole();
    let range = Some("bytes=180000-".to_owned());
    assert_eq!(place.bodies(before), [(FILE.to_owned(), range)]);
}

/// A server that would compress knows no ranges, and a client that lets it does without `Content-Range` or fails:
/// <https://github.com/jamie8johnson/cqs/pull/483>, <https://github.com/huggingface/hf-hub/issues/141>. The server here
/// does so, too, for whoever takes gzip.
#[test]
fn bug_28_ranges_are_asked_for_uncompressed() {
    let place = place();
    place.server.fail([Fault::Cut(0.6)], 1, body);
    assert_eq!(place.pull().unwrap(), SIZE);
    place.assert_whole();
    let last = place.server.served().pop().unwrap();
    assert_eq!((last.status, last.body_bytes), (206, SIZE * 4 / 10));

    // Where there are no ranges at all, the file comes from its beginning.
    let place = self::place();
    place.server.fail([Fault::Cut(0.6)], 1, body);
    place.server.fail([Fault::IgnoreRange], ALWAYS, body);
    place.pull().unwrap();
    place.assert_whole();
}

/// A lock that cannot be had panics: <https://github.com/huggingface/hf-hub/issues/106>. One that a process left when it
/// died is free; where none can be made, that is an error.
#[test]
fn bug_28_locks_are_waited_for_and_never_panic() {
    let place = place();
    let name = place.blob(FILE).file_name().unwrap().to_str().unwrap().to_owned();
    let locks = place.settings.cache.join(".locks").join("models--someone--model");
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join(format!("{name}.lock"))).unwrap();
    lock.lock().unwrap();
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| place.pull());
        while place.server.served().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(place.bodies(0), [], "someone else has it");
        drop(lock);
        pull.join().unwrap().unwrap();
    });
    place.assert_whole();

    let place = self::place();
    fs::create_dir_all(&place.settings.cache).unwrap();
    fs::write(place.settings.cache.join(".locks"), "").unwrap();
    let output = finish(place.pull_program());
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains(".locks") && !told.contains("panicked"), "{told}");
}
