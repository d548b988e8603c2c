use clap::Parser;
use viaduct::{
    cli::{Cli, Failure, misuse, run},
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
    let (failure, outcome) = match Cli::try_parse() {
        Ok(cli) => (cli.failure(), run(cli)),
        Err(error) => (Failure::default(), misuse(&error)),
    };
    match outcome {
        Ok(()) => exit(0),
        Err(error) => exit(failure.tell(&error)),
    }
}
