//! The server: two listeners, what they serve, what breaks, and what was asked.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{
    Endpoint, Fault, Repository, Request,
    answer::{Answer, Framing},
    connection,
    fault::Rule,
    routes::Routes,
};

/// One request that was served.
#[derive(Clone, Debug)]
pub struct Served {
    /// `GET`, `HEAD`, ….
    pub method: String,
    /// The path without the query, percent-encoded as it came.
    pub path: String,
    /// Which part of the hub it asked for.
    pub endpoint: Endpoint,
    /// The path in the repository of the file that it asked for; empty for other requests.
    pub file: String,
    /// The `Range` that it asked for.
    pub range: Option<String>,
    /// The status of the answer; 0 where a fault kept it from being written.
    pub status: u16,
    /// How many bytes of the body were written to the socket.
    pub body_bytes: u64,
    /// Whether an `Authorization` came along.
    pub authorised: bool,
    /// The faults that hit it.
    pub faults: Vec<Fault>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Host {
    Hub,
    Blobs,
}

/// A running hub; it stops when it is dropped.
pub struct HubServer {
    shared: Arc<Shared>,
    addresses: [(Host, SocketAddr); 2],
    listeners: Vec<JoinHandle<()>>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    stopped: Condvar,
}

struct State {
    routes: Routes,
    rules: Vec<Rule>,
    served: Vec<Served>,
    running: bool,
    pace: Option<(usize, Duration)>,
}

impl HubServer {
    /// Starts on two free ports of 127.0.0.1.
    pub fn start() -> io::Result<Self> {
        Self::start_on(0)
    }

    /// Starts the hub on this port, the blob host on a free one.
    pub fn start_on(port: u16) -> io::Result<Self> {
        let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        let bound = [(Host::Hub, bind(port)?), (Host::Blobs, bind(0)?)];
        let addresses = [(Host::Hub, bound[0].1.local_addr()?), (Host::Blobs, bound[1].1.local_addr()?)];
        let routes = Routes {
            repositories: BTreeMap::new(),
            hub: format!("http://{}", addresses[0].1),
            blobs: format!("http://{}", addresses[1].1),
        };
        let state = State { routes, rules: Vec::new(), served: Vec::new(), running: true, pace: None };
        let shared = Arc::new(Shared { state: Mutex::new(state), stopped: Condvar::new() });
        let mut server = Self { shared, addresses, listeners: Vec::new() };
        for (host, listener) in bound {
            server.listen(host, listener);
        }
        Ok(server)
    }

    /// The hub's address, for `HF_ENDPOINT`.
    pub fn url(&self) -> String {
        self.shared.lock().routes.hub.clone()
    }

    /// The address of the host of large files.
    pub fn blobs_url(&self) -> String {
        self.shared.lock().routes.blobs.clone()
    }

    /// Serves a repository from now on, in place of one of the same id.
    pub fn add(&self, repository: Repository) {
        let mut state = self.shared.lock();
        state.routes.repositories.insert(repository.id.clone(), Arc::new(repository));
    }

    /// Lets these faults, together, hit the next `times` requests that match. Of several such rules, the first one that
    /// matches and has not been used up hits. `matches` must not ask the server for anything.
    pub fn fail(
        &self,
        faults: impl Into<Vec<Fault>>,
        times: usize,
        matches: impl Fn(&Request) -> bool + Send + 'static,
    ) {
        self.shared.lock().rules.push(Rule { faults: faults.into(), times, matches: Box::new(matches) });
    }

    /// Nothing fails any more.
    pub fn heal(&self) {
        self.shared.lock().rules.clear();
    }

    /// Bodies are sent at no more than this rate a connection, in bytes per second; 0: as fast as can be.
    pub fn set_rate(&self, rate: usize) {
        const PARTS: usize = 50;
        let pause = Duration::from_secs(1) / PARTS as u32;
        self.shared.lock().pace = (rate > 0).then_some(((rate / PARTS).max(1), pause));
    }

    /// Every request so far, in the order of arrival.
    pub fn served(&self) -> Vec<Served> {
        self.shared.lock().served.clone()
    }

    /// Bytes of files that were sent: bodies of whole files and ranges, at the hub and the blob host.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes_since(0)
    }

    /// Like [`file_bytes`](Self::file_bytes), without the `first` requests.
    pub fn file_bytes_since(&self, first: usize) -> u64 {
        let state = self.shared.lock();
        let served = state.served.iter().skip(first);
        let files = served.filter(|served| matches!(served.status, 200 | 206) && !served.file.is_empty());
        files.map(|served| served.body_bytes).sum()
    }

    /// Closes both ports and every connection; whoever connects is refused.
    pub fn stop(&mut self) {
        if self.listeners.is_empty() {
            return;
        }
        self.shared.lock().running = false;
        self.shared.stopped.notify_all();
        for (_, address) in &self.addresses {
            // It wakes the listener, which then sees that it is to end.
            drop(TcpStream::connect(address));
        }
        for listener in self.listeners.drain(..) {
            drop(listener.join());
        }
    }

    /// Serves again on the same ports after [`stop`](Self::stop).
    pub fn restart(&mut self) -> io::Result<()> {
        self.shared.lock().running = true;
        for (host, address) in self.addresses {
            self.listen(host, TcpListener::bind(address)?);
        }
        Ok(())
    }

    fn listen(&mut self, host: Host, listener: TcpListener) {
        let shared = self.shared.clone();
        self.listeners.push(thread::spawn(move || accept(&listener, host, &shared)));
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(listener: &TcpListener, host: Host, shared: &Arc<Shared>) {
    let mut connections: Vec<(Weak<TcpStream>, JoinHandle<()>)> = Vec::new();
    for stream in listener.incoming() {
        if !shared.lock().running {
            break;
        }
        let Ok(stream) = stream else { continue };
        // Its own thread must be the last to hold it: a reset happens at the close of the last descriptor.
        let stream = Arc::new(stream);
        let (weak, shared) = (Arc::downgrade(&stream), shared.clone());
        let thread = thread::spawn(move || {
            // A client that goes away is no matter of ours.
            drop(connection::serve(&stream, host, &shared));
        });
        connections.retain(|(_, thread)| !thread.is_finished());
        connections.push((weak, thread));
    }
    for (stream, thread) in connections {
        if let Some(stream) = stream.upgrade() {
            drop(stream.shutdown(Shutdown::Both));
        }
        drop(thread.join());
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request, and makes its answer, broken as the rules say. The number is for [`add_bytes`](Self::add_bytes).
    pub fn admit(&self, mut request: Request) -> io::Result<(usize, Answer)> {
        let mut state = self.lock();
        let number = state.served.len();
        request.number = number;
        let mut served = Served {
            method: request.method.clone(),
            path: request.path.clone(),
            endpoint: request.endpoint,
            file: request.file.clone(),
            range: request.header("range").map(str::to_owned),
            status: 0,
            body_bytes: 0,
            authorised: request.header("authorization").is_some(),
            faults: Vec::new(),
        };
        if let Some(rule) = state.rules.iter_mut().find(|rule| rule.times > 0 && (rule.matches)(&request)) {
            rule.times -= 1;
            served.faults.clone_from(&rule.faults);
        }
        for fault in &served.faults {
            match fault {
                Fault::IgnoreRange => request.set_header("range", None),
                Fault::RangeFrom(offset) => request.set_header("range", Some(format!("bytes={offset}-"))),
                _ => {}
            }
        }
        let mut answer = state.routes.answer(&request);
        for fault in &served.faults {
            answer.break_content(fault)?;
        }
        answer.apply_range(&request);
        for fault in &served.faults {
            answer.break_delivery(fault);
        }
        if answer.delivery.framing != Framing::Length {
            answer.headers.retain(|(name, _)| *name != "Content-Length");
        }
        served.status = if answer.delivery.instead.is_some() { 0 } else { answer.status };
        state.served.push(served);
        Ok((number, answer))
    }

    pub fn add_bytes(&self, number: usize, bytes: i64) {
        if let Some(served) = self.lock().served.get_mut(number) {
            served.body_bytes = served.body_bytes.saturating_add_signed(bytes);
        }
    }

    pub fn pace(&self) -> Option<(usize, Duration)> {
        self.lock().pace
    }

    /// Sleeps, but not past the end of the server.
    pub fn pause(&self, time: Duration) {
        let state = self.lock();
        drop(self.stopped.wait_timeout_while(state, time, |state| state.running));
    }
}
