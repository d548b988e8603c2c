//! Stops a worker process before the machine runs out of memory.
//!
//! Two threads watch it. The first reads a few small files every 15 milliseconds and sends the signal; it never waits
//! for a driver, allocates nothing once it runs, and asks for a high priority. Its pages are not locked: they are used
//! so often that the kernel takes any others first, and locking needs rights that users may lack. The second asks the
//! GPU's driver how much the worker holds, for the record; some drivers answer only when the GPU has finished, so this
//! must not hold up the first. While no worker is guarded both sleep.

mod process_handle;
mod stopped;

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::memory::{
    Floor, HostMemory, MemoryGauge, MemorySource, ProcessGauge, ProcessGpuMemory, ProcessMemory,
};
use process_handle::ProcessHandle;

pub use stopped::Stopped;

/// How often available memory is read. At 1 GiB/s a worker takes 15 MiB in between, and the thread uses 0.6 % of a core.
const SAMPLING: Duration = Duration::from_millis(15);

/// How often the GPU's driver is asked.
const GPU_SAMPLING: Duration = Duration::from_millis(100);

/// Workers that there is room for without allocating; one is the rule, with another one that comes or goes.
const WORKERS: usize = 8;

/// How long the memory of a worker that yields may take to come back before others are killed, too. At 1 GiB/s they take half
/// of the smallest usual floor meanwhile.
const RELIEF: Duration = Duration::from_millis(250);

/// The kernel's own killer takes the process with the highest figure (-1000 to 1000, usually 0) first.
const OOM_SCORE: &[u8] = b"800";

/// Watches worker processes and kills those that leave less memory available than the floor.
pub struct Watchdog {
    source: MemorySource,
    floor: Floor,
    watch: Arc<Watch>,
}

/// The running threads and what they share. They end when neither watchdog nor guards are left.
struct Watch {
    state: Arc<State>,
    memory_thread: Option<JoinHandle<()>>,
}

/// What a stage was seen to hold at most, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StagePeak {
    pub stage: String,
    pub planned: u64,
    /// Resident pages: the kernel's own peak if this stage raised it, else the highest reading.
    pub resident: u64,
    /// The GPU's own memory and pages lent to it, the highest reading.
    pub gpu: u64,
    /// Host and GPU together, each page counted once, the highest reading.
    pub held: u64,
}

#[derive(Default)]
struct State {
    wards: Mutex<Wards>,
    /// A worker came or went, or the watchdog ends.
    changed: Condvar,
}

#[derive(Default)]
struct Wards {
    list: Vec<Ward>,
    next_id: u64,
    ending: bool,
}

/// One guarded worker.
struct Ward {
    id: u64,
    pid: u32,
    handle: ProcessHandle,
    process: ProcessGauge,
    /// `None` when the kernel does not tell what is available: then the worker is measured but never killed.
    host: Option<MemoryGauge>,
    /// Whether the last reading told what is available.
    sees: bool,
    /// Whether the worker is killed before others.
    yields: bool,
    floor: u64,
    gpu: ProcessGpuMemory,
    stage: StagePeak,
    /// The kernel's peak when the stage began.
    peak_before: u64,
    peaks: Vec<StagePeak>,
    sighting: Option<Sighting>,
}

/// The reading that killed a worker.
#[derive(Clone, Copy)]
struct Sighting {
    host: HostMemory,
    process: ProcessMemory,
    seen: Instant,
    reaction: Duration,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Wards> {
        self.wards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next turn, without end while there is no worker; `None` when the watchdog ends.
    fn next_turn<'a>(
        &'a self,
        wards: MutexGuard<'a, Wards>,
        pause: Duration,
    ) -> Option<MutexGuard<'a, Wards>> {
        let (wards, _) = self.changed.wait_timeout(wards, pause).unwrap_or_else(PoisonError::into_inner);
        let wards = self
            .changed
            .wait_while(wards, |wards| wards.list.is_empty() && !wards.ending)
            .unwrap_or_else(PoisonError::into_inner);
        (!wards.ending).then_some(wards)
    }
}

impl Watchdog {
    /// Starts the threads. The floor is reckoned for each worker, whose control group may have a limit of its own.
    pub fn start(source: MemorySource, floor: Floor) -> io::Result<Watchdog> {
        let state = Arc::new(State::default());
        state.lock().list.reserve(WORKERS);
        let mut watch = Watch { state: state.clone(), memory_thread: None };
        let (memory_state, gpu_state, gpu_source) = (state.clone(), state, source.clone());
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        watch.memory_thread = Some(thread("watchdog").spawn(move || watch_memory(&memory_state))?);
        thread("watchdog-gpu").spawn(move || watch_gpus(&gpu_state, &gpu_source))?;
        Ok(Watchdog { source, floor, watch: Arc::new(watch) })
    }

    /// Watches a child process until the guard is dropped. Both have to happen before the child is collected (`wait`):
    /// until then its number cannot pass to another process. `planned` is what the plan says of the stage, in bytes.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn guard(&self, pid: u32, stage: &str, planned: u64) -> io::Result<Guard> {
        let handle = ProcessHandle::open(pid)?;
        let process = ProcessGauge::open(&self.source, pid).ok_or(io::ErrorKind::NotFound)?;
        let mut host = MemoryGauge::of_process(&self.source, pid);
        let seen = host.as_mut().and_then(MemoryGauge::read);
        let mut ward = Ward {
            id: 0,
            pid,
            handle,
            process,
            host: host.filter(|_| seen.is_some()),
            sees: seen.is_some(),
            yields: false,
            floor: self.floor.of(seen.map_or(0, |host| host.total())),
            gpu: ProcessGpuMemory::default(),
            stage: StagePeak { stage: stage.to_owned(), planned, ..StagePeak::default() },
            peak_before: 0,
            peaks: Vec::new(),
            sighting: None,
        };
        ward.peak_before = ward.process.read().map_or(0, |process| process.peak);
        let state = &self.watch.state;
        let mut wards = state.lock();
        ward.id = wards.next_id;
        wards.next_id += 1;
        let guard = Guard { id: ward.id, watch: self.watch.clone() };
        wards.list.push(ward);
        drop(wards);
        state.changed.notify_all();
        Ok(guard)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.state.lock().ending = true;
        self.state.changed.notify_all();
        // The other thread may be held up by a driver, and nobody has to wait for that.
        if let Some(thread) = self.memory_thread.take() {
            let _ = thread.join();
        }
    }
}

/// A guarded worker. Drop it before the worker is collected.
#[must_use = "the worker is watched only as long as its guard lives"]
pub struct Guard {
    id: u64,
    watch: Arc<Watch>,
}

impl Guard {
    /// Whether the kernel does not tell how much memory is available: the worker is measured but will not be killed, of
    /// which the user should be warned.
    pub fn is_blind(&self) -> bool {
        self.with_ward(|ward| !ward.sees)
    }

    /// From here on, until it begins another stage, the worker is killed before others: nobody waits for what it does, so
    /// that the run survives its end. Only if that does not help are others killed.
    pub fn yield_to_others(&self) {
        self.with_ward(|ward| ward.yields = true);
    }

    /// The worker begins another stage.
    pub fn begin_stage(&self, stage: &str, planned: u64) {
        let next = StagePeak { stage: stage.to_owned(), planned, ..StagePeak::default() };
        self.with_ward(|ward| {
            if ward.sighting.is_some() {
                // It was killed in the stage before, and the record stays with that.
                return;
            }
            ward.yields = false;
            // A stage may be shorter than the time between two readings.
            let process = ward.process.read();
            ward.note(process);
            ward.peak_before = process.map_or(ward.peak_before, |process| process.peak);
            let ended = std::mem::replace(&mut ward.stage, next);
            ward.peaks.push(ended);
        });
    }

    /// Why the watchdog killed the worker, if it did.
    pub fn stopped(&self) -> Option<Stopped> {
        self.with_ward(|ward| {
            ward.sighting.map(|Sighting { host, process, reaction, .. }| Stopped {
                stage: ward.stage.stage.clone(),
                planned: ward.stage.planned,
                process,
                gpu: ward.gpu,
                available: host.available(),
                floor: ward.floor,
                limit: host.limit(),
                reaction,
            })
        })
    }

    /// What the stages so far held at most, in their order; the last may go on.
    pub fn peaks(&self) -> Vec<StagePeak> {
        self.with_ward(|ward| {
            let process = ward.process.read();
            ward.note(process);
            ward.peaks.iter().chain([&ward.stage]).cloned().collect()
        })
    }

    fn with_ward<T>(&self, work: impl FnOnce(&mut Ward) -> T) -> T {
        let mut wards = self.watch.state.lock();
        let ward = wards.list.iter_mut().find(|ward| ward.id == self.id);
        work(ward.expect("a ward is listed as long as its guard lives"))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut wards = self.watch.state.lock();
        let place = wards.list.iter().position(|ward| ward.id == self.id);
        let ward = place.map(|place| wards.list.swap_remove(place));
        drop(wards);
        drop(ward);
    }
}

impl Ward {
    /// One reading; kills the worker if too little is available, it may be killed and is not dying already.
    fn sample(&mut self, may_kill: bool) {
        if self.sighting.is_some() {
            return;
        }
        let seen = Instant::now();
        let process = self.process.read();
        self.note(process);
        let Some(gauge) = &mut self.host else { return };
        let host = gauge.read_until(self.floor);
        if self.sees && host.is_none() {
            tracing::warn!(
                "the kernel no longer tells how much memory is available; the worker is not watched"
            );
        }
        self.sees = host.is_some();
        // A worker without memory has ended: nothing to stop.
        let (Some(process), Some(host)) = (process, host) else { return };
        if may_kill && host.available() < self.floor && self.handle.kill().is_ok() {
            self.sighting = Some(Sighting { host, process, seen, reaction: seen.elapsed() });
        }
    }

    /// Whether the worker was killed so short a time ago that its memory may still come back.
    fn gives_back(&self) -> bool {
        let recent = self.sighting.is_some_and(|sighting| sighting.seen.elapsed() < RELIEF);
        recent && !self.handle.has_ended()
    }

    /// Raises the stage's peaks.
    fn note(&mut self, process: Option<ProcessMemory>) {
        let process = process.unwrap_or_default();
        let resident = if process.peak > self.peak_before { process.peak } else { process.resident };
        let stage = &mut self.stage;
        stage.resident = stage.resident.max(resident);
        stage.gpu = stage.gpu.max(self.gpu.total());
        stage.held = stage.held.max(process.with_gpu(self.gpu));
    }
}

fn watch_memory(state: &State) {
    raise_priority();
    let mut wards = state.lock();
    while let Some(turn) = state.next_turn(wards, SAMPLING) {
        wards = turn;
        sample(&mut wards.list);
    }
}

/// One reading of all, those first that yield to others.
fn sample(wards: &mut [Ward]) {
    wards.iter_mut().filter(|ward| ward.yields).for_each(|ward| ward.sample(true));
    let relieved = wards.iter().any(|ward| ward.yields && ward.gives_back());
    wards.iter_mut().filter(|ward| !ward.yields).for_each(|ward| ward.sample(!relieved));
}

fn watch_gpus(state: &State, source: &MemorySource) {
    let mut wards = state.lock();
    while let Some(turn) = state.next_turn(wards, GPU_SAMPLING) {
        let workers: Vec<(u64, u32)> = turn.list.iter().map(|ward| (ward.id, ward.pid)).collect();
        // A driver may be slow, and the other thread needs the list.
        drop(turn);
        let seen: Vec<_> = workers.iter().map(|(id, pid)| (*id, source.process_gpu(*pid))).collect();
        wards = state.lock();
        // A killed worker holds nothing any more; the record keeps what it held.
        for ward in wards.list.iter_mut().filter(|ward| ward.sighting.is_none()) {
            if let Some((_, gpu)) = seen.iter().find(|(id, _)| *id == ward.id) {
                ward.gpu = *gpu;
                ward.stage.gpu = ward.stage.gpu.max(gpu.total());
            }
        }
    }
}

/// So that the watchdog runs when everything else wants to, if the user may do that.
fn raise_priority() {
    // SAFETY: changes the priority of the calling thread; a refusal is harmless.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -20) };
}

/// Lets the kernel's own killer, which strikes where the watchdog did not, prefer this process to all that the user has
/// open. For the worker to call before anything else, also between `fork` and `exec`: it allocates nothing, and what it
/// sets outlives `exec`. Everybody may raise the figure.
///
/// # Errors
/// If the kernel refuses or has no such file.
pub fn volunteer_for_oom_killer() -> io::Result<()> {
    // SAFETY: the path is zero-terminated, the descriptor is closed once, and all three calls are async-signal-safe.
    let written = unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        let written = libc::write(file, OOM_SCORE.as_ptr().cast(), OOM_SCORE.len());
        libc::close(file);
        written
    };
    if written == OOM_SCORE.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
}
