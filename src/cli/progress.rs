//! Shows events on standard error: bars on a terminal, JSON lines for machines, else only what needs saying.

use std::{io::IsTerminal, time::Duration};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle as BarStyle};
use viaduct_export::bytes::ByteSize;

use super::{ProgressStyle, downloads::Downloads, printer::complain};
use crate::pipeline::event::{Event, Listener};

pub struct Progress {
    style: ProgressStyle,
    bar: Option<ProgressBar>,
    /// The bar, and those of downloads above it.
    bars: MultiProgress,
    downloads: Downloads,
    /// Seconds of all steps so far, for the mean.
    step_seconds: f64,
}

impl Progress {
    pub fn new(style: ProgressStyle) -> Progress {
        let drawn = style == ProgressStyle::Auto && std::io::stderr().is_terminal();
        let bars = MultiProgress::new();
        let bar = drawn.then(|| bars.add(ProgressBar::no_length()));
        if let Some(bar) = &bar {
            bar.set_style(spinner());
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Progress { style, bar, bars, downloads: Downloads::default(), step_seconds: 0.0 }
    }

    fn say(&self, line: &str) {
        match self.bar {
            Some(_) => self.bars.suspend(|| complain(line)),
            None => complain(line),
        }
    }

    /// Tells of one last event from another thread, in place of the bar.
    pub fn last_word(&self) -> impl Fn(Event) + Send + 'static {
        let (style, bar, bars) = (self.style, self.bar.clone(), self.bars.clone());
        move |event| {
            if let Some(bar) = &bar {
                bar.finish_and_clear();
                // What cannot be cleared stays; the word comes all the same.
                let _ = bars.clear();
                bars.set_draw_target(ProgressDrawTarget::hidden());
            }
            let bars = MultiProgress::new();
            Progress { style, bar: None, bars, downloads: Downloads::default(), step_seconds: 0.0 }
                .on_event(event);
        }
    }

    /// A sign of life where no bar can be drawn.
    fn tell(&mut self, event: &Event) {
        match event {
            Event::Stage { name, index, count } => self.say(&format!("[{index}/{count}] {name}")),
            Event::Step { index, count, seconds } => {
                self.say(&format!("step {index}/{count}, {seconds:.3} s"))
            }
            Event::Download { .. } => {
                if let Some(line) = self.downloads.line(event) {
                    self.say(&line);
                }
            }
            _ => {}
        }
    }

    fn draw(&mut self, event: &Event) {
        let Some(bar) = &self.bar else {
            if self.style == ProgressStyle::Auto {
                self.tell(event);
            }
            return;
        };
        match event {
            Event::Stage { name, index, count } => {
                bar.set_style(spinner());
                bar.set_message(format!("[{index}/{count}] {name}"));
            }
            Event::Step { index, count, seconds } => {
                self.step_seconds += seconds;
                bar.set_style(steps());
                bar.set_length(*count as u64);
                bar.set_position(*index as u64);
                bar.set_message(format!("{:.3} s/step", self.step_seconds / *index as f64));
            }
            Event::Bytes { what, done, total } => {
                bar.set_style(bytes());
                bar.set_length(total.unwrap_or(*done));
                bar.set_position(*done);
                bar.set_message(what.clone());
            }
            Event::Download { .. } => self.downloads.draw(event, &self.bars),
            Event::Kept { .. }
            | Event::Memory { .. }
            | Event::Warning { .. }
            | Event::Error { .. }
            | Event::Note { .. } => {}
        }
    }
}

impl Listener for Progress {
    fn on_event(&mut self, event: Event) {
        if self.style == ProgressStyle::Json {
            complain(&event.to_json_line());
            return;
        }
        match &event {
            Event::Warning { message } => self.say(&format!("warning: {message}")),
            Event::Error { message, .. } => self.say(&format!("error: {message}")),
            Event::Note { message } if self.style == ProgressStyle::Auto => self.say(message),
            Event::Memory { stage, planned, measured } if self.style == ProgressStyle::Auto => {
                let [planned, measured] = [*planned, *measured].map(ByteSize);
                self.say(&format!("{stage}: planned {planned}, took {measured}"));
            }
            other => self.draw(other),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.downloads.clear();
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn styled(template: &str) -> BarStyle {
    BarStyle::with_template(template).unwrap_or_else(|_| BarStyle::default_bar())
}

fn spinner() -> BarStyle {
    styled("{spinner} {msg} {elapsed}")
}

fn steps() -> BarStyle {
    styled("[{bar:30}] step {pos}/{len} {msg}, {eta} left")
}

pub(super) fn bytes() -> BarStyle {
    styled("[{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left  {msg}")
}
