//! Reads an ONNX model and writes it again, weights and all: what the reader and the writer cost without any pass.
//!
//!     cargo run --release -p viaduct-export --example round_trip -- IN.onnx OUT.onnx

use std::{env, error::Error, path::Path, process::ExitCode};

use viaduct_export::onnx::{WriteOptions, read_model, write_model};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [input, output] = arguments.as_slice() else {
        eprintln!("usage: round_trip IN.onnx OUT.onnx");
        return ExitCode::from(2);
    };
    match round_trip(Path::new(input), Path::new(output)) {
        Ok(bytes) => {
            println!("{bytes} bytes");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The number of bytes written, over all files.
fn round_trip(input: &Path, output: &Path) -> Result<u64, Box<dyn Error>> {
    let summary = write_model(&read_model(input)?, output, &WriteOptions::default())?;
    Ok(summary.files.iter().map(|file| file.bytes).sum())
}
