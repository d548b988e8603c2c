use clap::Parser;
use viaduct::{
    cli::{Cli, code_of, complain, in_words, misuse, run},
    runtime::{exit, make_file_limits_errors},
};

/// Results are on disk when `run` returns; nothing that a library does at the process's end may hold it up.
fn main() {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("VIADUCT_LOG"))
        .with_writer(std::io::stderr)
        // Where standard error cannot be written to, nobody reads its errors either.
        .log_internal_errors(false)
        .init();
    make_file_limits_errors();
    let outcome = match Cli::try_parse() {
        Ok(cli) => run(cli),
        Err(error) => misuse(&error),
    };
    match outcome {
        Ok(()) => exit(0),
        Err(error) => {
            complain(&format!("error: {}", in_words(&error)));
            exit(code_of(&error))
        }
    }
}
