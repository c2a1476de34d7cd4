//! Makes the write-ahead log durable again after a failed sync.
//!
//! After a failed sync the system may treat unwritten pages as clean: a later sync skips them and reports
//! success. Pages that are written again are synced. So the log is written over itself and synced before
//! anything is copied from it. Otherwise a power loss could leave newer pages in the database file under an
//! older log.
//!
//! Some file systems drop the pages that they could not write. Their bytes are then lost at once, although
//! SQLite's index of the log still refers to them. The checksums of the frames show that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::limits::REWRITE_BYTES;

/// Why the log could not be made durable.
#[derive(Debug, thiserror::Error)]
pub(super) enum RewriteError {
    #[error("writing the log again: {0}")]
    Io(#[from] io::Error),
    /// SQLite would copy wrong pages into the database file.
    #[error(
        "a sync failed, and the disk lost a part of hapax.db-wal: {intact} of {committed} pages are intact. \
         No answered request depends on the lost part. Start hapax again to continue without it"
    )]
    Lost { intact: u32, committed: u32 },
}

/// The header of the log, and of each frame. A frame is a header and a page.
const LOG_HEADER: usize = 32;
const FRAME_HEADER: usize = 24;

/// Writes the log over itself and syncs it. The caller keeps others from writing meanwhile. `committed` is the number of its first frames that must be intact.
pub(super) fn rewrite(log: &Path, committed: u32) -> Result<(), RewriteError> {
    let log = File::options().read(true).write(true).open(log)?;
    let mut head = [0; LOG_HEADER];
    let read = read_full(&log, &mut head, 0)?;
    log.write_all_at(&head[..read], 0)?;
    let mut frames = Frames::after(&head);
    // A chunk holds whole frames, so that one write covers each frame.
    let mut chunk = vec![0; (REWRITE_BYTES / frames.bytes).max(1) * frames.bytes];
    let mut at = LOG_HEADER as u64;
    loop {
        let read = read_full(&log, &mut chunk, at)?;
        chunk[..read].chunks_exact(frames.bytes).for_each(|frame| frames.check(frame));
        log.write_all_at(&chunk[..read], at)?;
        at += read as u64;
        if read < chunk.len() {
            break;
        }
    }
    if frames.intact < committed {
        return Err(RewriteError::Lost { intact: frames.intact, committed });
    }
    Ok(log.sync_data()?)
}

/// Fills `into` as far as the file goes.
fn read_full(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut full = 0;
    while full < into.len() {
        match file.read_at(&mut into[full..], at + full as u64)? {
            0 => break,
            read => full += read,
        }
    }
    Ok(full)
}

/// Counts the intact frames of a log from its start. Each checksum continues the one before.
struct Frames {
    bytes: usize,
    salts: [u8; 8],
    /// Whether the checksums read their words with the most significant byte first.
    is_big_endian: bool,
    sums: [u32; 2],
    intact: u32,
    is_over: bool,
}

impl Frames {
    /// The frames behind this header of the log.
    fn after(head: &[u8; LOG_HEADER]) -> Self {
        let page = word(&head[8..12]) as usize;
        let is_sound = (512..=65_536).contains(&page);
        let mut frames = Self {
            bytes: if is_sound { FRAME_HEADER + page } else { REWRITE_BYTES },
            salts: head[16..24].try_into().expect("eight bytes"),
            is_big_endian: head[3] & 1 == 1,
            sums: [0; 2],
            intact: 0,
            is_over: !is_sound,
        };
        frames.add(&head[..24]);
        frames.is_over |= !frames.has_sums(&head[24..32]);
        frames
    }

    fn check(&mut self, frame: &[u8]) {
        if self.is_over {
            return;
        }
        let (head, page) = frame.split_at(FRAME_HEADER);
        self.add(&head[..8]);
        self.add(page);
        self.is_over = head[8..16] != self.salts || !self.has_sums(&head[16..24]);
        self.intact += u32::from(!self.is_over);
    }

    fn add(&mut self, bytes: &[u8]) {
        let [mut one, mut two] = self.sums;
        for pair in bytes.chunks_exact(8) {
            let [first, second] = [&pair[..4], &pair[4..]].map(|bytes| match self.is_big_endian {
                true => word(bytes),
                false => word(bytes).swap_bytes(),
            });
            one = one.wrapping_add(first).wrapping_add(two);
            two = two.wrapping_add(second).wrapping_add(one);
        }
        self.sums = [one, two];
    }

    fn has_sums(&self, stored: &[u8]) -> bool {
        self.sums == [word(&stored[..4]), word(&stored[4..])]
    }
}

/// Four bytes, the most significant one first.
fn word(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes.try_into().expect("four bytes"))
}
