//! `hub-server FOLDER --id owner/name [--port N] [--rate BYTES_PER_S]`: serves a folder as a repository of the hub until
//! it is killed, and prints the address for `HF_ENDPOINT`.

use std::{error::Error, path::Path, process::ExitCode, thread};

use viaduct_hub_server::{HubServer, Repository};

const USAGE: &str = "usage: hub-server FOLDER --id owner/name [--port N] [--rate BYTES_PER_S]";

fn main() -> ExitCode {
    match serve(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hub-server: error: {error}");
            ExitCode::from(1)
        }
    }
}

fn serve(mut arguments: impl Iterator<Item = String>) -> Result<(), Box<dyn Error>> {
    let (mut folder, mut id, mut port, mut rate) = (None, None, 0, 0);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--id" => id = arguments.next(),
            "--port" => port = arguments.next().ok_or(USAGE)?.parse()?,
            "--rate" => rate = arguments.next().ok_or(USAGE)?.parse()?,
            _ => folder = Some(argument),
        }
    }
    let (folder, id) = folder.zip(id).ok_or(USAGE)?;
    let repository = Repository::from_folder(&id, Path::new(&folder))?;
    let server = HubServer::start_on(port)?;
    server.set_rate(rate);
    server.add(repository);
    println!("{}", server.url());
    loop {
        thread::park();
    }
}
