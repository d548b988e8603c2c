//! One cache for Python's `huggingface_hub` and for Viaduct, both ways.

use std::{path::Path, process::Command};

use viaduct_hub_server::{Endpoint, Served};

use crate::{
    bad::{finish, text},
    place::{Files, ID, Place, repository},
    processes::{files, json, program, pull},
    python::python,
};

/// What Python's client returns, from the place's hub and in its cache.
fn snapshot_download(python: &Path, place: &Place, arguments: &str, offline: bool) -> String {
    let script = format!(
        "import warnings; warnings.simplefilter('error')\n\
         from huggingface_hub import snapshot_download\n\
         print(snapshot_download('{ID}', {arguments}))"
    );
    let mut command = Command::new(python);
    command.args(["-c", &script]).env("HF_HOME", place.home.path()).env("HF_ENDPOINT", place.server.url());
    command.env("HF_HUB_DISABLE_PROGRESS_BARS", "1").env("HF_HUB_OFFLINE", if offline { "1" } else { "0" });
    command.env_remove("HF_HUB_CACHE").env_remove("HF_TOKEN");
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    text(&output.stdout).trim_end().to_owned()
}

/// Requests for bodies, and what else was asked.
fn bodies(served: &[Served]) -> Vec<&Served> {
    served
        .iter()
        .filter(|served| {
            served.endpoint == Endpoint::Blob
                || served.status == 200 && !served.file.is_empty() && served.method == "GET"
        })
        .collect()
}

/// A hub that answers small files itself, and one that sends on to them.
fn places() -> [Place; 2] {
    let files = Files::from([("empty.json".into(), Vec::new())]).into_iter().chain(files()).collect();
    [Place::new(&files), Place::serving(&files, repository(&files).cached_redirects().tag("v1"))]
}

#[test]
fn what_python_brought_is_used_without_a_byte() {
    let Some(python) = python() else { return };
    for place in places() {
        let path = snapshot_download(&python, &place, "", false);
        let before = place.server.served().len();
        let said = json(&finish(pull(&place)));
        assert_eq!(said["path"].as_str(), Some(path.as_str()));
        assert_eq!(said["transferred"].as_u64(), Some(0));
        let served = &place.server.served()[before..];
        assert!(bodies(served).is_empty(), "{served:?}");
        assert!(served.iter().all(|served| served.endpoint == Endpoint::Info), "{served:?}");
        for (path, content) in &place.files {
            assert_eq!(
                std::fs::read(Path::new(said["path"].as_str().unwrap()).join(path)).unwrap(),
                *content
            );
        }
    }
}

#[test]
fn what_was_pulled_is_used_by_python_without_a_byte() {
    let Some(python) = python() else { return };
    for place in places() {
        let said = json(&finish(pull(&place)));
        place.assert_whole();
        let before = place.server.served().len();
        let commit = format!("revision='{}'", said["commit"].as_str().unwrap());
        for (arguments, offline) in [
            ("local_files_only=True", false),
            ("", true),
            (&commit[..], true),
            ("", false),
            (&commit[..], false),
        ] {
            let path = snapshot_download(&python, &place, arguments, offline);
            assert_eq!(said["path"].as_str(), Some(path.as_str()), "{arguments}");
            let served = &place.server.served()[before..];
            assert!(bodies(served).is_empty(), "{served:?}");
            let asked = served.iter().filter(|served| served.endpoint != Endpoint::Unknown).count();
            assert!(asked == 0 || !offline && arguments != "local_files_only=True", "{served:?}");
        }
    }
}

/// Half of the files are Python's, the other half is brought; and what Python left of a transfer is in nobody's way.
#[test]
fn what_python_brought_in_part_is_completed() {
    let Some(python) = python() else { return };
    let [place, _] = places();
    snapshot_download(&python, &place, "allow_patterns=['*.json', 'b.bin']", false);
    let stray = place.blob("a/weights.safetensors").with_extension("0a1b2c3d.incomplete");
    std::fs::write(&stray, "some of it").unwrap();
    let before = place.server.served().len();
    json(&finish(pull(&place)));
    let rest = place.files["a/weights.safetensors"].len() as u64;
    assert_eq!(place.server.file_bytes_since(before), rest);
    std::fs::remove_file(stray).unwrap();
    let folder = json(&finish(program(&place, &format!("pull {ID} --all --json"))))["path"].clone();
    assert_eq!(snapshot_download(&python, &place, "", true), folder.as_str().unwrap());
}
