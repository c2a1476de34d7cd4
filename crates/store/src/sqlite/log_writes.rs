//! Writes the frames of a commit to the log with one call instead of two for each page.
//!
//! SQLite writes the header and the page of each frame by itself. Most of the time of such a small write is the call
//! and the file system's work on pages that the next write touches again. So this VFS gathers the frames of a commit,
//! and writes them when the last one is complete, which is marked. All other calls go to SQLite's own VFS, and so do all
//! calls on other files.
//!
//! Frames are gathered only while this thread is inside [`gather`], around `COMMIT`. SQLite then writes all frames in a
//! row, and gets the error of a write before it counts any of them as committed. Frames that leave the cache earlier
//! are written at once: if such a transaction were rolled back, another program could commit in their place, and a
//! later write of them would destroy that commit.
//!
//! SQLite's interface for a VFS is C: this is the only file with unsafe code.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rusqlite::ffi::{
    self, SQLITE_ERROR, SQLITE_OK, SQLITE_OPEN_WAL, sqlite3_file, sqlite3_int64,
    sqlite3_io_methods, sqlite3_vfs,
};

use crate::limits::LOG_WRITE_BYTES_MAX;

/// The name of this VFS, for a connection that is opened.
const NAME: &CStr = c"hapax-log";

/// The length of a frame's header. A page is always longer.
const FRAME_HEADER_BYTES: usize = 24;

/// The bytes of a frame's header that are zero unless the frame ends a commit.
const COMMIT_MARK: std::ops::Range<usize> = 4..8;

thread_local! {
    /// The number of the call of [`gather`] that this thread is inside of, or [`OUTSIDE`].
    static GATHERS: Cell<u64> = const { Cell::new(OUTSIDE) };
}

const OUTSIDE: u64 = 0;

/// Runs `commit`, which commits a transaction on this thread and does nothing else. Its frames are written with one
/// call. If the commit fails, the caller must roll the transaction back: frames that are gathered by then are dropped.
pub(super) fn gather<T>(commit: impl FnOnce() -> T) -> T {
    static LAST: AtomicU64 = AtomicU64::new(OUTSIDE);

    /// Ends the gathering, also after a panic.
    struct Gathering;

    impl Drop for Gathering {
        fn drop(&mut self) {
            GATHERS.set(OUTSIDE);
        }
    }

    debug_assert_eq!(GATHERS.get(), OUTSIDE, "a commit inside of another would drop its frames");
    GATHERS.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    let _gathering = Gathering;
    commit()
}

/// SQLite's own VFS, once [`register`] has found it.
static DEFAULT: AtomicPtr<sqlite3_vfs> = AtomicPtr::new(ptr::null_mut());

/// Returns the name of the VFS, and registers it at the first call.
pub(super) fn vfs() -> rusqlite::Result<&'static CStr> {
    static REGISTERED: OnceLock<c_int> = OnceLock::new();
    match *REGISTERED.get_or_init(register) {
        SQLITE_OK => Ok(NAME),
        code => Err(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)),
    }
}

fn register() -> c_int {
    // SAFETY: SQLite's own VFS lives as long as the process. The copy does too, because it is leaked. Its functions
    // are those of SQLite's VFS, which find all they need in the copied fields, except `open`.
    unsafe {
        let default = ffi::sqlite3_vfs_find(ptr::null());
        if default.is_null() {
            return SQLITE_ERROR;
        }
        DEFAULT.store(default, Ordering::Release);
        let own = Box::leak(Box::new(sqlite3_vfs {
            zName: NAME.as_ptr(),
            pNext: ptr::null_mut(),
            szOsFile: (*default).szOsFile + size_of::<LogFile>() as c_int,
            xOpen: Some(open),
            ..*default
        }));
        ffi::sqlite3_vfs_register(own, 0)
    }
}

/// An open log. SQLite's own file lies behind it in the memory that SQLite allocated for both.
#[repr(C)]
struct LogFile {
    /// SQLite finds the functions of a file here.
    base: sqlite3_file,
    frames: ManuallyDrop<GatheredFrames>,
}

/// Frames of a commit that continue the log and are not written yet.
struct GatheredFrames {
    bytes: Vec<u8>,
    /// The position of the first of these bytes; `None` while it is unknown where the log ends.
    start: Option<sqlite3_int64>,
    /// The last header that was seen ends a commit.
    ends_commit: bool,
    /// The call of [`gather`] that these bytes belong to.
    of: u64,
    /// The error of a write in this call, or `SQLITE_OK`. Frames are lost that SQLite may already count as written, so
    /// every later access in this call fails too, and the commit with it.
    failed: c_int,
}

impl GatheredFrames {
    fn new() -> Self {
        Self { bytes: Vec::new(), start: None, ends_commit: false, of: OUTSIDE, failed: SQLITE_OK }
    }

    /// Drops what an earlier call of [`gather`] has left behind: its commit failed and was rolled back. Frames can be
    /// left if they leave the cache before the commit's own, as when a virtual table writes its index at the commit.
    fn drop_if_stale(&mut self) {
        let now = GATHERS.get();
        if self.of == now {
            return;
        }
        if !self.bytes.is_empty() {
            self.bytes.clear();
            self.start = None;
        }
        self.of = now;
        self.failed = SQLITE_OK;
    }

    /// The position of the byte after the last one, if it is known.
    fn end(&self) -> Option<sqlite3_int64> {
        self.start.map(|start| start + self.bytes.len() as sqlite3_int64)
    }

    /// Adds a part of a frame. Returns false if the part must be written by itself.
    ///
    /// A part of 24 bytes is a header: a page is longer, and SQLite splits a page only on disks without powersafe
    /// overwrite, which it does not assume.
    fn add(&mut self, part: &[u8], at: sqlite3_int64) -> bool {
        self.drop_if_stale();
        if part.len() == FRAME_HEADER_BYTES {
            self.ends_commit = part[COMMIT_MARK].iter().any(|byte| *byte != 0);
        }
        let continues = self.of != OUTSIDE && self.end() == Some(at);
        if continues {
            self.bytes.extend_from_slice(part);
        }
        continues
    }

    /// Whether the gathered bytes must be written now. A commit is complete with its last frame's page.
    fn is_complete(&self, last_part_bytes: usize) -> bool {
        (self.ends_commit && last_part_bytes != FRAME_HEADER_BYTES)
            || self.bytes.len() >= LOG_WRITE_BYTES_MAX
    }
}

/// SQLite's own file and its functions.
struct OwnFile {
    file: *mut sqlite3_file,
    methods: &'static sqlite3_io_methods,
}

impl LogFile {
    /// SQLite's own file behind an open log.
    ///
    /// # Safety
    /// `file` must be a log that [`open`] has opened and [`close`] has not closed.
    unsafe fn own(file: *mut sqlite3_file) -> OwnFile {
        // SAFETY: `open` has placed the file there, and its functions live as long as the process.
        unsafe {
            let own = file.cast::<LogFile>().add(1).cast::<sqlite3_file>();
            OwnFile { file: own, methods: &*(*own).pMethods }
        }
    }

    /// The frames that an open log has gathered.
    ///
    /// # Safety
    /// As [`LogFile::own`], and no other reference to the frames may be in use.
    unsafe fn frames<'a>(file: *mut sqlite3_file) -> &'a mut GatheredFrames {
        // SAFETY: `open` has placed the frames there. SQLite uses a file on one thread at a time.
        unsafe { &mut (*file.cast::<LogFile>()).frames }
    }

    /// Writes the gathered frames.
    ///
    /// # Safety
    /// As [`LogFile::frames`].
    unsafe fn write_gathered(file: *mut sqlite3_file) -> c_int {
        // SAFETY: the caller keeps the promises of both functions.
        let (own, frames) = unsafe { (Self::own(file), Self::frames(file)) };
        frames.drop_if_stale();
        let start = match frames.start {
            Some(start) if frames.failed == SQLITE_OK && !frames.bytes.is_empty() => start,
            Some(_) | None => return frames.failed,
        };
        // SAFETY: the bytes are valid during the call.
        let code = unsafe { own.write(&frames.bytes, start) };
        frames.start = if code == SQLITE_OK { frames.end() } else { None };
        frames.failed = code;
        frames.bytes.clear();
        code
    }
}

impl OwnFile {
    /// Writes in pieces: SQLite's own function cannot write 128 KiB at once.
    ///
    /// # Safety
    /// The file must be open.
    unsafe fn write(&self, bytes: &[u8], mut at: sqlite3_int64) -> c_int {
        let Some(write) = self.methods.xWrite else { return SQLITE_ERROR };
        for piece in bytes.chunks(LOG_WRITE_BYTES_MAX) {
            // SAFETY: the piece is valid for its length.
            let code = unsafe { write(self.file, piece.as_ptr().cast(), piece.len() as c_int, at) };
            if code != SQLITE_OK {
                return code;
            }
            at += piece.len() as sqlite3_int64;
        }
        SQLITE_OK
    }
}

/// Opens a file: a log with the functions below, any other file with SQLite's own.
unsafe extern "C" fn open(
    _vfs: *mut sqlite3_vfs,
    name: *const c_char,
    file: *mut sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes memory of `szOsFile` bytes, which has room for a `LogFile` and SQLite's own file.
    unsafe {
        // SQLite calls this only after `register`. The program may have another default VFS by now, whose files need
        // not fit.
        let default = DEFAULT.load(Ordering::Acquire);
        let Some(open_own) = (*default).xOpen else { return SQLITE_ERROR };
        if flags & SQLITE_OPEN_WAL == 0 {
            return open_own(default, name, file, flags, out_flags);
        }
        // Without functions, SQLite does not close a file that could not be opened.
        (*file).pMethods = ptr::null();
        let own = file.cast::<LogFile>().add(1).cast::<sqlite3_file>();
        (*own).pMethods = ptr::null();
        let code = open_own(default, name, own, flags, out_flags);
        if code == SQLITE_OK {
            let frames = ManuallyDrop::new(GatheredFrames::new());
            let base = sqlite3_file { pMethods: &METHODS };
            file.cast::<LogFile>().write(LogFile { base, frames });
        }
        code
    }
}

static METHODS: sqlite3_io_methods = sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    // These belong to the database file and never to the log.
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

unsafe extern "C" fn write(
    file: *mut sqlite3_file,
    data: *const c_void,
    length: c_int,
    at: sqlite3_int64,
) -> c_int {
    // SAFETY: SQLite passes `length` bytes and a log that is open.
    unsafe {
        let part = std::slice::from_raw_parts(data.cast::<u8>(), length.max(0) as usize);
        let frames = LogFile::frames(file);
        if frames.add(part, at) {
            return match frames.is_complete(part.len()) {
                true => LogFile::write_gathered(file),
                false => SQLITE_OK,
            };
        }
        // The start of the log, or a frame that is written again.
        let code = LogFile::write_gathered(file);
        if code != SQLITE_OK {
            return code;
        }
        let code = LogFile::own(file).write(part, at);
        let end = at + sqlite3_int64::from(length);
        LogFile::frames(file).start = (code == SQLITE_OK).then_some(end);
        code
    }
}

unsafe extern "C" fn close(file: *mut sqlite3_file) -> c_int {
    // SAFETY: SQLite passes a log that is open, and does not use it afterwards.
    unsafe {
        // What a failed commit has left behind goes with the file.
        ManuallyDrop::drop(&mut (*file.cast::<LogFile>()).frames);
        let own = LogFile::own(file);
        match own.methods.xClose {
            Some(close) => close(own.file),
            None => SQLITE_OK,
        }
    }
}

/// Functions that write the gathered frames and then call SQLite's own function.
macro_rules! after_writing {
    ($($name:ident, $method:ident($($argument:ident: $type:ty),*);)*) => {$(
        unsafe extern "C" fn $name(file: *mut sqlite3_file, $($argument: $type),*) -> c_int {
            // SAFETY: SQLite passes a log that is open, and arguments that its own function takes.
            unsafe {
                let code = LogFile::write_gathered(file);
                if code != SQLITE_OK {
                    return code;
                }
                let own = LogFile::own(file);
                match own.methods.$method {
                    Some(method) => method(own.file, $($argument),*),
                    None => SQLITE_ERROR,
                }
            }
        }
    )*};
}

after_writing! {
    read, xRead(into: *mut c_void, length: c_int, at: sqlite3_int64);
    truncate, xTruncate(size: sqlite3_int64);
    sync, xSync(flags: c_int);
    file_size, xFileSize(size: *mut sqlite3_int64);
    lock, xLock(level: c_int);
    unlock, xUnlock(level: c_int);
    check_reserved_lock, xCheckReservedLock(is_reserved: *mut c_int);
    file_control, xFileControl(operation: c_int, argument: *mut c_void);
}

/// Functions that only describe the file.
macro_rules! described {
    ($($name:ident, $method:ident;)*) => {$(
        unsafe extern "C" fn $name(file: *mut sqlite3_file) -> c_int {
            // SAFETY: SQLite passes a log that is open.
            unsafe {
                let own = LogFile::own(file);
                match own.methods.$method {
                    Some(method) => method(own.file),
                    None => 0,
                }
            }
        }
    )*};
}

described! {
    sector_size, xSectorSize;
    device_characteristics, xDeviceCharacteristics;
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hapax_core::KeyHash;
    use rusqlite::{Connection, OpenFlags};

    use super::*;

    fn open_in(directory: &Path, settings: &str) -> Connection {
        let vfs = vfs().expect("registers");
        let file = directory.join("hapax.db");
        let conn = Connection::open_with_flags_and_vfs(file, OpenFlags::default(), vfs);
        let conn = conn.expect("opens");
        conn.execute_batch(settings).expect("sets");
        conn.execute_batch(
            "PRAGMA journal_mode = wal; PRAGMA wal_autocheckpoint = 0;
             CREATE TABLE IF NOT EXISTS effect (n INTEGER PRIMARY KEY, body BLOB)",
        )
        .expect("a table");
        conn
    }

    fn commit(conn: &Connection) {
        gather(|| conn.execute_batch("COMMIT")).expect("commits");
    }

    /// The rows that another process would find if this one were killed now.
    fn rows_after_a_kill(directory: &Path) -> Vec<(i64, i64)> {
        let copy = tempfile::tempdir().expect("a directory");
        for name in ["hapax.db", "hapax.db-wal"] {
            std::fs::copy(directory.join(name), copy.path().join(name)).expect("copies");
        }
        let conn = Connection::open(copy.path().join("hapax.db")).expect("opens");
        let check: String =
            conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("checks");
        assert_eq!(check, "ok");
        rows(&conn)
    }

    fn rows(conn: &Connection) -> Vec<(i64, i64)> {
        let mut rows =
            conn.prepare("SELECT n, length(body) FROM effect ORDER BY n").expect("reads");
        let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).expect("reads");
        rows.collect::<Result<_, _>>().expect("reads")
    }

    /// Numbers that look random and are the same in every run.
    struct Dice(KeyHash);

    impl Dice {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = KeyHash::of(b"dice", [&self.0.0[..]]);
            (u128::from_le_bytes(self.0.0) as u64) % bound
        }
    }

    #[test]
    fn every_commit_is_in_the_log_when_it_returns() {
        // A kill loses what this process has gathered and not written. Pages leave the small cache before the commit,
        // are written again, or are rolled back; checkpoints let the log start over. Commits are not synced, so
        // no sync writes the frames.
        for seed in 0..12 {
            let directory = tempfile::tempdir().expect("a directory");
            let mut dice = Dice(KeyHash::of(b"seed", [&[seed][..]]));
            let page_bytes = [1024, 8192, 65536][dice.below(3) as usize];
            let settings = format!(
                "PRAGMA page_size = {page_bytes}; PRAGMA cache_size = 10; PRAGMA synchronous = NORMAL"
            );
            let conn = open_in(directory.path(), &settings);
            for _ in 0..20 {
                conn.execute_batch("BEGIN IMMEDIATE").expect("begins");
                for _ in 0..dice.below(30) {
                    let (n, bytes) = (dice.below(60) as i64, dice.below(40_000) as i64);
                    conn.execute("REPLACE INTO effect VALUES (?1, randomblob(?2))", (n, bytes))
                        .expect("writes");
                }
                if dice.below(4) == 0 {
                    conn.execute_batch("ROLLBACK").expect("rolls back");
                } else {
                    commit(&conn);
                }
                assert_eq!(rows_after_a_kill(directory.path()), rows(&conn), "seed {seed}");
                if dice.below(5) == 0 {
                    let mode = ["PASSIVE", "TRUNCATE"][dice.below(2) as usize];
                    conn.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], |_| Ok(()))
                        .expect("copies the log");
                }
            }
        }
    }

    #[test]
    fn frames_of_a_transaction_that_was_rolled_back_never_overwrite_another_commit() {
        // Pages leave the small cache, the transaction is rolled back, and another program commits in the place of
        // their frames. Later writes, reads and the end of the connection must not bring them back.
        for is_update in [false, true] {
            let directory = tempfile::tempdir().expect("a directory");
            let settings =
                "PRAGMA page_size = 8192; PRAGMA cache_size = 10; PRAGMA synchronous = FULL";
            let conn = open_in(directory.path(), settings);
            let fill =
                "WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < 200)
                        REPLACE INTO effect SELECT n + ?1, randomblob(3000) FROM n";
            conn.execute(fill, [0]).expect("writes");
            conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("copies");
            for round in 1..6 {
                conn.execute_batch("BEGIN IMMEDIATE").expect("begins");
                conn.execute(fill, [if is_update { 0 } else { 1000 * round }]).expect("writes");
                conn.execute_batch("ROLLBACK").expect("rolls back");
                let other = Connection::open(directory.path().join("hapax.db")).expect("opens");
                other.execute(fill, [100 * round]).expect("writes");
                assert_eq!(rows_after_a_kill(directory.path()), rows(&other), "round {round}");
                conn.execute_batch("BEGIN IMMEDIATE").expect("begins");
                conn.execute("REPLACE INTO effect VALUES (?1, 'x')", [round]).expect("writes");
                commit(&conn);
                assert_eq!(rows_after_a_kill(directory.path()), rows(&other), "round {round}");
            }
            let kept = rows(&conn);
            let other = Connection::open(directory.path().join("hapax.db")).expect("opens");
            // Without the other connection the log would go with the last one.
            assert_eq!(rows(&other), kept);
            drop(conn);
            assert_eq!(rows_after_a_kill(directory.path()), kept, "after the end");
        }
    }

    fn frames_after(parts: &[(usize, bool, sqlite3_int64)]) -> Vec<bool> {
        let mut frames = GatheredFrames { start: Some(32), ..GatheredFrames::new() };
        let complete = parts.iter().map(|&(length, ends_commit, at)| {
            let mut part = vec![0; length];
            part[4] = u8::from(ends_commit);
            assert!(frames.add(&part, at), "it continues the log");
            frames.is_complete(length)
        });
        gather(|| complete.collect())
    }

    #[test]
    fn frames_wait_for_the_page_that_ends_their_commit() {
        let complete = frames_after(&[
            (24, false, 32),
            (4096, false, 56),
            (24, true, 4152),
            // A page is no header: its bytes say nothing about the end of a commit.
            (4096, false, 4176),
        ]);
        assert_eq!(complete, [false, false, false, true]);
    }

    #[test]
    fn frames_that_a_failed_commit_left_behind_are_dropped() {
        let mut frames = GatheredFrames { start: Some(32), ..GatheredFrames::new() };
        gather(|| {
            assert!(frames.add(&[0; 24], 32));
            assert!(!frames.add(&[0; 24], 4152), "a frame that is written again");
        });
        assert!(!frames.add(&[0; 24], 56), "a frame that leaves the cache before a commit");
        assert_eq!((frames.bytes.len(), frames.start), (0, None));
        assert!(!gather(|| frames.add(&[0; 24], 56)), "it is unknown where the log ends");
    }

    #[test]
    fn a_long_transaction_is_written_before_its_end() {
        // Otherwise a large delete would be in memory twice.
        let page = LOG_WRITE_BYTES_MAX / 2;
        let at = |frame: usize| (32 + frame * (24 + page)) as sqlite3_int64;
        let complete = frames_after(&[
            (24, false, at(0)),
            (page, true, at(0) + 24),
            (24, false, at(1)),
            (page, true, at(1) + 24),
        ]);
        assert_eq!(complete, [false, false, false, true]);
    }
}
