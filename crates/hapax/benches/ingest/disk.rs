//! The cost of one sync on the disk of the data directory: the least time that a durable answer to
//! a single sender can take.

use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;

const PAGE: [u8; 4096] = [b'h'; 4096];

/// Syncs in one measurement: enough for a median, short enough to fit between two slices.
const SYNCS: u32 = 400;

/// How long syncs of 4 KiB took, in microseconds.
#[derive(Default)]
pub(crate) struct Syncs {
    appended_us: Vec<u32>,
    preallocated_us: Vec<u32>,
}

impl Syncs {
    /// Measures some syncs of a file that grows with each, and of one with a fixed size.
    pub(crate) fn measure(&mut self, directory: &Path) -> anyhow::Result<()> {
        let path = directory.join("sync");
        let mut file = File::create(&path).context("making a file to sync")?;
        sync_each(&mut file, &mut self.appended_us).context("syncing a growing file")?;
        file.sync_all()?;
        file.seek(SeekFrom::Start(0))?;
        sync_each(&mut file, &mut self.preallocated_us).context("syncing a file")?;
        std::fs::remove_file(&path).context("removing that file")
    }

    pub(crate) fn appended_us_p50(&self) -> f64 {
        median(&self.appended_us)
    }

    pub(crate) fn preallocated_us_p50(&self) -> f64 {
        median(&self.preallocated_us)
    }
}

fn sync_each(file: &mut File, taken_us: &mut Vec<u32>) -> std::io::Result<()> {
    for _ in 0..SYNCS {
        let began = Instant::now();
        file.write_all(&PAGE)?;
        file.sync_data()?;
        taken_us.push(u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX));
    }
    Ok(())
}

fn median(taken_us: &[u32]) -> f64 {
    let mut sorted = taken_us.to_vec();
    sorted.sort_unstable();
    sorted.get(sorted.len() / 2).copied().unwrap_or(0).into()
}
