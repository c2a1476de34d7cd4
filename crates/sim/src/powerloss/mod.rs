//! Simulated power loss. strace records the system calls of a real run. From the recording, disk images are
//! generated as they could look after a power loss at any moment of that run.
//!
//! [`Recording`] reads the log of strace. [`Disk`] replays the recording up to a moment and generates an
//! image: synced data is there, and any part of the rest may be missing.

mod disk;
mod recording;

pub use disk::{Disk, SeededRng};
pub use recording::{DiskStep, Recording};
