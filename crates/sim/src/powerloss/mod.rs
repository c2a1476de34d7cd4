//! Power loss without pulling a plug: the system calls of a real run are recorded with strace, and
//! disk images are drawn as they could be found after a power loss at any moment of that run.
//!
//! [`Recording`] reads what strace wrote, in its order. [`Disk`] replays it up to a moment and draws
//! an image: what was synced is there, of everything else any part may be missing.

mod disk;
mod recording;

pub use disk::{Disk, SeededRng};
pub use recording::{DiskStep, Recording};
