//! Shows how far downloads are: a bar for each file and one for all, or now and then a line.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar};
use viaduct_export::bytes::ByteSize;

use super::progress::bytes;
use crate::{pipeline::event::Event, printable};

/// A downloaded file of fewer bytes is not worth a line.
const WORTH_A_LINE: u64 = 1 << 20;
/// How often there is a line where nothing else is told.
const PAUSE: Duration = Duration::from_secs(10);

/// What was shown so far.
#[derive(Default)]
pub struct Downloads {
    files: BTreeMap<String, ProgressBar>,
    all: Option<ProgressBar>,
    told: Option<Instant>,
}

impl Downloads {
    /// Draws a download's event above the last of the bars.
    pub fn draw(&mut self, event: &Event, bars: &MultiProgress) {
        let Event::Download { file, done, bytes, all_done, all_bytes } = event else { return };
        // What was there before this process has begun counts for no speed.
        let begun = |place, name: &str, done, bytes_in_all| {
            let bar = ProgressBar::new(bytes_in_all).with_style(self::bytes());
            let bar = bar.with_message(printable::one_line(name)).with_position(done);
            bar.reset_eta();
            bars.insert(place, bar)
        };
        let all = self.all.get_or_insert_with(|| begun(0, "in all", *all_done, *all_bytes));
        all.set_length(*all_bytes);
        all.set_position(*all_done);
        if done < bytes {
            let bar = self.files.entry(file.clone()).or_insert_with(|| begun(0, file, *done, *bytes));
            bar.set_position(*done);
        } else if let Some(bar) = self.files.remove(file) {
            bar.finish_and_clear();
            bars.remove(&bar);
        }
        if all_done == all_bytes {
            self.clear();
        }
    }

    /// A line, if the event is worth one.
    pub fn line(&mut self, event: &Event) -> Option<String> {
        let Event::Download { file, done, bytes, all_done, all_bytes } = event else { return None };
        let [size, here, all] = [*bytes, *all_done, *all_bytes].map(ByteSize);
        let line = match self.told {
            None if *all_bytes >= WORTH_A_LINE => format!("downloading {all}, of which {here} are here"),
            _ if done == bytes && *bytes >= WORTH_A_LINE => format!("{file}: {size} downloaded"),
            Some(told) if told.elapsed() >= PAUSE => format!("{here} of {all} downloaded"),
            _ => return None,
        };
        self.told = Some(Instant::now());
        Some(line)
    }

    pub fn clear(&mut self) {
        for bar in std::mem::take(&mut self.files).into_values().chain(self.all.take()) {
            bar.finish_and_clear();
        }
    }
}
