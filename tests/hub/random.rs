//! Random repositories, random faults, random interruptions: whatever happens, files are whole or not there.

use std::{thread, time::Duration};

use viaduct::hub::HubError;
use viaduct_hub_server::{Endpoint, Fault, Request, noise};

use crate::place::{Files, Place};

/// Each a repository, faults, and often an interruption.
const RUNS: u64 = 240;
const THREADS: u64 = 4;
const LARGEST: u64 = 300_000;

/// Random numbers that follow from the seed.
struct Dice(std::vec::IntoIter<u8>);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(noise(seed, 8192).into_iter())
    }

    /// A number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.0.by_ref().take(8).fold(0, |number, byte| number << 8 | u64::from(byte)) % end
    }

    fn share(&mut self) -> f64 {
        self.below(1001) as f64 / 1000.0
    }

    fn one_of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize].clone()
    }
}

fn files(dice: &mut Dice) -> Files {
    let names = ["w.safetensors", "x/w.data", "x/y/w.bin", "config.json", "x/config.json", "tokenizer.json"];
    let count = 1 + dice.below(5);
    let mut file = |name: &str| {
        let size = dice.one_of(&[0, 1, 1000, LARGEST / 10, LARGEST, LARGEST]);
        (name.to_owned(), noise(dice.below(u64::MAX), dice.below(size + 1) as usize))
    };
    names.iter().take(count as usize).map(|name| file(name)).collect()
}

/// Faults that hit together.
fn faults(dice: &mut Dice) -> Vec<Fault> {
    let millis = |dice: &mut Dice| Duration::from_millis(dice.below(4));
    let framing = dice.one_of(&[None, None, Some(Fault::NoLength), Some(Fault::Chunked)]);
    let fault = match dice.below(15) {
        0 | 1 => Fault::Cut(dice.share()),
        2 => Fault::Reset(dice.share()),
        3 => Fault::ResetBeforeAnswer,
        4 => Fault::Hang(millis(dice)),
        5 => Fault::Drip(1 + dice.below(LARGEST) as usize / 8 + 5000, millis(dice)),
        6 => Fault::Flip(dice.share()),
        7 => Fault::IgnoreRange,
        8 => Fault::NotSatisfiable,
        9 => Fault::Changed,
        10 => Fault::Status(dice.one_of(&[500, 502, 503, 504])),
        11 => Fault::TooManyRequests(dice.one_of(&["0", "soon"]).to_owned()),
        12 => Fault::RangeFrom(dice.below(LARGEST)),
        13 => Fault::Header("Content-Range", dice.one_of(&[None, Some("bytes 1-2/3".to_owned())])),
        _ => Fault::Header("Content-Length", Some(dice.below(LARGEST).to_string())),
    };
    framing.into_iter().chain([fault]).collect()
}

/// Whether a fault makes bytes come twice, or be sent and not taken.
fn wastes(fault: &Fault) -> bool {
    use Fault::{Header, IgnoreRange, NotSatisfiable, RangeFrom};
    spoils(fault) || matches!(fault, IgnoreRange | RangeFrom(_) | NotSatisfiable | Header(..))
}

/// Whether a fault leaves bytes in the cache that are found to be wrong only when all are there.
fn spoils(fault: &Fault) -> bool {
    matches!(fault, Fault::Flip(_) | Fault::Changed)
}

fn add_faults(dice: &mut Dice, place: &Place) {
    for _ in 0..dice.below(5) {
        let (faults, times) = (faults(dice), 1 + dice.below(5) as usize);
        let modulus = 1 + dice.below(3) as usize;
        let endpoint = dice.one_of(&[Endpoint::Info, Endpoint::Resolve, Endpoint::Blob, Endpoint::Blob]);
        // Nothing tells that a listing has a wrong byte.
        let is_safe = !faults.iter().any(spoils);
        let matches =
            move |request: &Request| request.endpoint == endpoint && request.number.is_multiple_of(modulus);
        if endpoint != Endpoint::Info || is_safe {
            place.server.fail(faults, times, matches);
        }
    }
}

/// Pulls, and asserts what holds at each end: whole files and the bytes that were missing, or an error and no file.
/// Says whether it ended well.
fn pull(place: &Place, seed: u64, time: Duration) -> bool {
    let first = place.server.served().len();
    let missing = missing(place);
    let result = place.watched(|| place.pull_within(time));
    let moved = place.server.file_bytes_since(first);
    let served = place.server.served();
    let spoilt = served.iter().flat_map(|served| &served.faults).any(spoils);
    let served = &served[first..];
    let wasted = spoilt || served.iter().flat_map(|served| &served.faults).any(wastes);
    match result {
        Ok(came) => {
            place.assert_whole();
            if !wasted {
                assert_eq!((moved, came), (missing, missing), "seed {seed}: {served:#?}");
            }
            true
        }
        Err(HubError::Interrupted) => false,
        Err(error) => {
            let known = matches!(
                error,
                HubError::Transfer { .. }
                    | HubError::Unreachable { .. }
                    | HubError::RateLimited { .. }
                    | HubError::Corrupt { .. }
                    | HubError::Listing { .. }
                    | HubError::Status { .. }
            );
            assert!(known, "seed {seed}: {error}");
            place.look().unwrap();
            false
        }
    }
}

/// Bytes that are not in the cache, whole or not.
fn missing(place: &Place) -> u64 {
    place.contents().into_iter().map(|(path, bytes)| bytes - place.there(&path).min(bytes)).sum()
}

fn run(seed: u64) -> (bool, bool) {
    let mut dice = Dice::new(seed);
    let place = Place::new(&files(&mut dice));
    add_faults(&mut dice, &place);
    let time = if dice.below(3) == 0 { Duration::from_micros(dice.below(10_000)) } else { Duration::MAX };
    let first = pull(&place, seed, time);
    let second = pull(&place, seed, Duration::MAX);
    place.server.heal();
    // The hub is well again.
    assert!(pull(&place, seed, Duration::MAX), "seed {seed}");
    let before = place.server.served().len();
    assert!(pull(&place, seed, Duration::MAX), "seed {seed}");
    assert_eq!(place.bodies(before), [], "seed {seed}: all was there");
    (first, second)
}

#[test]
fn random_runs_end_in_whole_files_or_errors() {
    // Much of a run is waiting, for the disk and for the hub.
    let ends: Vec<(bool, bool)> = thread::scope(|scope| {
        let shares: Vec<_> = (0..THREADS)
            .map(|share| {
                scope.spawn(move || (share..RUNS).step_by(THREADS as usize).map(run).collect::<Vec<_>>())
            })
            .collect();
        shares.into_iter().flat_map(|share| share.join().unwrap()).collect()
    });
    // Both happen, or the runs would show little.
    let well = ends.iter().filter(|(first, _)| *first).count();
    let after = ends.iter().filter(|(first, second)| !first && *second).count();
    assert!(
        well >= 80 && ends.len() - well >= 40 && after >= 20,
        "{well} at once, {after} at the second time"
    );
}
