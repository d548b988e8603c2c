//! The child's side: loads ONNX Runtime and does what the parent asks, one session at a time.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, Write},
    os::fd::{AsRawFd, FromRawFd},
    path::Path,
};

use viaduct_export::bundle::Bundle;

use super::{
    exchange::Exchange,
    protocol::{Open, Reply, Request, TensorRef},
};
use crate::runtime::{Binding, Runtime, RuntimeError, Stage, peak};

/// Makes a worker misbehave, for tests of its parent: `hang:STAGE` never closes the stage, `crash:STAGE` aborts in its
/// run, `babble:STAGE` answers it with nonsense, `crash-ahead:STAGE` aborts when it opens the stage ahead, `linger` never ends.
const MISBEHAVIOUR: &str = "VIADUCT_TEST_WORKER";

/// Serves the parent at the other end of standard input and output until it closes them.
pub fn serve() -> io::Result<()> {
    let mut parent = Parent::connect()?;
    let Some(Request::Start { options, exchange }) = parent.next()? else { return Ok(()) };
    let mut exchange = Exchange::new(exchange.path(), &format!("c{}-", std::process::id()));
    let mut runtime = match Runtime::start(&options) {
        Ok(runtime) => runtime,
        Err(e) => return parent.fail(&e),
    };
    // Sessions end before the runtime does.
    let mut ahead: Vec<(Open, Stage<'static>)> = Vec::new();
    parent.say(&Reply::Started { device: Box::new(runtime.device().clone()) })?;
    while let Some(request) = parent.next()? {
        match request {
            Request::OpenAhead(wanted) => {
                if parent.misbehaves("crash-ahead", &wanted.stage) {
                    std::process::abort();
                }
                // The reason is told when the parent opens the stage and it fails again.
                if let Ok(stage) = open(&mut runtime, &wanted) {
                    ahead.push((wanted, stage));
                }
            }
            Request::Open(wanted) => {
                peak::restart();
                let place = ahead.iter().position(|(opened, _)| opened.stage == wanted.stage);
                // One that was opened otherwise ends here.
                let waiting = place.map(|place| ahead.remove(place)).filter(|(opened, _)| *opened == wanted);
                match waiting.map_or_else(|| open(&mut runtime, &wanted), |(_, stage)| Ok(stage)) {
                    Ok(stage) => session(stage, &mut parent, &mut exchange)?,
                    Err(e) => parent.fail(&e)?,
                }
            }
            _ => return Err(io::Error::other("no stage is open")),
        }
    }
    if parent.misbehaves("linger", "") {
        std::thread::park();
    }
    Ok(())
}

fn open(runtime: &mut Runtime, wanted: &Open) -> Result<Stage<'static>, RuntimeError> {
    let bundle = Bundle::open(Path::new(&wanted.bundle))?;
    let exposed: Vec<&str> = wanted.exposed.iter().map(String::as_str).collect();
    let binding = Binding { exposed: &exposed, settings: wanted.settings, ..Binding::new(&wanted.sizes) };
    runtime.load_stage(&bundle, &wanted.stage, &binding)
}

/// Serves one session until it is closed.
fn session(mut stage: Stage<'_>, parent: &mut Parent, exchange: &mut Exchange) -> io::Result<()> {
    let outputs = stage.outputs().iter().map(|output| output.name.clone()).collect();
    parent.say(&Reply::Opened { outputs, nodes: stage.nodes().clone() })?;
    let name = stage.name().to_owned();
    while let Some(request) = parent.next()? {
        let done = match request {
            Request::Bind { name, tensor } => bind(&mut stage, exchange, &name, &tensor),
            Request::Run { inputs, outputs } => {
                if parent.misbehaves("crash", &name) {
                    std::process::abort();
                }
                run(&mut stage, exchange, &inputs, &outputs)
            }
            Request::Close => {
                parent.say(&Reply::Closing { peak: peak::bytes() })?;
                if parent.misbehaves("hang", &name) {
                    std::thread::park();
                }
                drop(stage);
                return parent.say(&Reply::Closed);
            }
            Request::Start { .. } | Request::OpenAhead(_) | Request::Open(_) => {
                return Err(io::Error::other("a stage is open"));
            }
        };
        match done {
            Ok(_) if parent.misbehaves("babble", &name) => parent.write("{}")?,
            Ok(reply) => parent.say(&reply)?,
            Err(e) => parent.fail(&e)?,
        }
    }
    Ok(())
}

fn bind(
    stage: &mut Stage<'_>,
    exchange: &Exchange,
    name: &str,
    tensor: &TensorRef,
) -> Result<Reply, RuntimeError> {
    stage.bind(name, &exchange.borrow(tensor)?)?;
    Ok(Reply::Bound)
}

fn run(
    stage: &mut Stage<'_>,
    exchange: &mut Exchange,
    inputs: &[(String, TensorRef)],
    outputs: &[String],
) -> Result<Reply, RuntimeError> {
    let inputs: Vec<_> = inputs
        .iter()
        .map(|(name, tensor)| Ok((name.as_str(), exchange.borrow(tensor)?)))
        .collect::<Result<_, RuntimeError>>()?;
    let inputs: Vec<_> = inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    let mut tensors = Vec::with_capacity(outputs.len());
    stage.run_into(&inputs, &outputs, &mut |output| {
        tensors.push(exchange.write(output.values.dtype(), &output.shape, output.values.as_bytes())?);
        Ok(())
    })?;
    Ok(Reply::Ran { tensors })
}

/// The other end of standard input and output.
struct Parent {
    input: BufReader<io::Stdin>,
    output: File,
    misbehaviour: String,
}

impl Parent {
    /// Takes standard output for itself: what a library prints there goes to standard error.
    fn connect() -> io::Result<Parent> {
        io::stdout().flush()?;
        // SAFETY: both descriptors are this process's own, and the new one is owned by the file from here on.
        let output = unsafe {
            let own = libc::dup(io::stdout().as_raw_fd());
            if own < 0 || libc::dup2(libc::STDERR_FILENO, libc::STDOUT_FILENO) < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(own)
        };
        let misbehaviour = std::env::var(MISBEHAVIOUR).unwrap_or_default();
        Ok(Parent { input: BufReader::new(io::stdin()), output, misbehaviour })
    }

    /// The next request; `None` when there will be no more.
    fn next(&mut self) -> io::Result<Option<Request>> {
        let mut line = String::new();
        match self.input.read_line(&mut line)? {
            0 => Ok(None),
            _ => Ok(Some(serde_json::from_str(&line)?)),
        }
    }

    fn say(&mut self, reply: &Reply) -> io::Result<()> {
        self.write(&serde_json::to_string(reply)?)
    }

    fn fail(&mut self, error: &RuntimeError) -> io::Result<()> {
        self.say(&Reply::Failed { message: error.to_string(), exit_code: error.exit_code() })
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        self.output.write_all(format!("{line}\n").as_bytes())
    }

    fn misbehaves(&self, how: &str, stage: &str) -> bool {
        match self.misbehaviour.split_once(':') {
            Some((kind, name)) => kind == how && name == stage,
            None => self.misbehaviour == how,
        }
    }
}
