//! `cargo run -p viaduct-procedural --example write_checkpoint -- SPEC DEST`: a fixture's checkpoint, to look at.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, dest] = args.as_slice() else {
        eprintln!("usage: write_checkpoint SPEC DEST");
        return ExitCode::from(2);
    };
    match viaduct_procedural::write_checkpoint(Path::new(spec), Path::new(dest)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
