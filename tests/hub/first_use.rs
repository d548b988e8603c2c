//! A model by its repository's name: downloaded on first use, and used without a hub from then on.

use std::{
    fs,
    process::Stdio,
    thread::sleep,
    time::{Duration, Instant},
};

use viaduct_hub_server::{Endpoint, Fault, Repository};

use crate::{
    bad::{Good, finish, text},
    place::{Files, ID, Place},
};

const DRAW: &str =
    "generate -b someone/model -p cat --size 32x32 --steps 1 --seed 1 --ep cpu --progress none";

/// A hub with a bundle and more than belongs to it.
fn place() -> Place {
    let good = Good::bundle();
    let bundle = Repository::from_folder(ID, &good.copy().path().join("b")).unwrap();
    let bundle = bundle.file("README.md", "of no use").lfs("twin.safetensors", vec![7; 1000]);
    Place::serving(&Files::new(), bundle.license("apache-2.0"))
}

#[test]
fn a_bundle_is_downloaded_once_and_then_used_offline() {
    let mut place = place();
    let draw = |place: &Place, to: &str, offline: bool| {
        let mut command = place.program(&format!("{DRAW} -o {to}"));
        if offline {
            command.env("HF_HUB_OFFLINE", "1");
        }
        let output = finish(command);
        (output.status.code(), text(&output.stderr))
    };
    let (code, told) = draw(&place, "offline.png", true);
    assert_eq!(code, Some(1), "{told}");
    let says = [ID, "not in the cache", "HF_HUB_OFFLINE", "viaduct pull", "--model-dir"];
    assert!(says.iter().all(|text| told.contains(text)), "{told}");
    assert!(place.server.served().is_empty());

    let (code, told) = draw(&place, "first.png", false);
    assert_eq!(code, Some(0), "{told}");
    let asked: Vec<String> = place.bodies(0).into_iter().map(|(file, _)| file).collect();
    assert!(asked.contains(&"transformer.onnx".to_owned()), "{asked:?}");
    assert!(!asked.iter().any(|file| file == "README.md" || file == "twin.safetensors"), "{asked:?}");
    let before = place.server.served().len();
    for (to, offline) in [("second.png", false), ("third.png", true)] {
        assert_eq!(draw(&place, to, offline).0, Some(0));
    }
    assert_eq!(place.server.served().len(), before, "what is there is used without a word to the hub");
    place.server.stop();
    let (code, told) = draw(&place, "fourth.png", false);
    assert_eq!(code, Some(0), "{told}");
    let picture = |name: &str| fs::read(place.home.path().join(name)).unwrap();
    for name in ["second.png", "third.png", "fourth.png"] {
        assert!(picture(name) == picture("first.png"), "{name}");
    }
}

#[test]
fn an_interrupted_first_use_is_gone_on_with() {
    let place = place();
    // The transformer's weights never come.
    place.server.fail([Fault::Hang(Duration::from_secs(60))], usize::MAX, |request| {
        request.endpoint == Endpoint::Blob && request.file.starts_with("transformer-")
    });
    let mut command = place.program(&format!("{DRAW} -o out.png"));
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while !place.server.served().iter().any(|served| served.file.ends_with(".data")) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", place.bodies(0));
        sleep(Duration::from_millis(5));
    }
    // SAFETY: it sends a signal to a process that was started here and has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) }, 0);
    let output = child.wait_with_output().unwrap();
    let told = text(&output.stderr);
    assert!(output.status.code() == Some(143) && told.contains("run it again to go on"), "{told}");
    place.server.heal();
    let output = finish(place.program(&format!("{DRAW} -o out.png")));
    assert!(output.status.success(), "{}", text(&output.stderr));
}
