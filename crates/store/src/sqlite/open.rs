//! Opens the database file: checks the version of SQLite, takes the lock that makes this process
//! the only owner, applies the settings that make a commit durable, and migrates.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use hapax_core::{KeyHash, tuned};
use rusqlite::{Connection, OpenFlags, OptionalExtension};

use crate::file_permissions::{narrow, private_dir, private_file};
use crate::limits::{PAGE_BYTES, REWRITE_BYTES, STATEMENT_VALUE_BYTES_MAX};

/// SQLite below this can lose committed writes of a write-ahead log.
const SQLITE_VERSION_MIN: i32 = 3_051_003;

/// The file that the user and Hapax share.
const FILE: &str = "hapax.db";

/// Why the database cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The directory or lock file cannot be used.
    #[error("cannot use {path}: {source}")]
    Io {
        /// The path.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Another process owns it.
    #[error("{0} is in use by another hapax process; one process owns a data directory")]
    InUse(PathBuf),
    /// The linked SQLite version can lose data.
    #[error("SQLite {0} can lose committed writes; 3.51.3 or newer is needed")]
    Version(String),
    /// A migration was changed after it was applied.
    #[error(
        "migration {version} in this database is not the one this hapax knows; \
         it was written by another build, or changed by hand"
    )]
    Migration {
        /// The version of the migration.
        version: i64,
    },
    /// A trigger or foreign key of the user could act on a table of Hapax, or make its writes fail.
    #[error(
        "{theirs} refers to {ours}, a table of Hapax, and could make its writes fail: \
         drop it, and keep the event's id as a plain column instead"
    )]
    Entangled {
        /// The user's trigger or foreign key.
        theirs: String,
        /// The table of Hapax.
        ours: String,
    },
    /// The database was written by a newer hapax.
    #[error("this database was written by a newer hapax (migration {0}); use that one")]
    Newer(i64),
    /// SQLite returned an error.
    #[error("opening {path}: {source}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// The error.
        source: rusqlite::Error,
    },
}

/// The location of a database, owned by this process until dropped.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    value_bytes_max: usize,
    _lock: File,
}

impl Place {
    /// Takes the data directory for this process, and creates it if needed.
    pub(super) fn own(directory: &Path) -> Result<Self, OpenError> {
        if rusqlite::version_number() < SQLITE_VERSION_MIN {
            return Err(OpenError::Version(rusqlite::version().to_owned()));
        }
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::Io { path, source }
        };
        private_dir(directory).map_err(io(directory))?;
        let lock_path = directory.join("hapax.lock");
        let lock = private_file(&lock_path).map_err(io(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(OpenError::InUse(directory.to_owned())),
            Err(TryLockError::Error(source)) => {
                return Err(OpenError::Io { path: lock_path, source });
            }
        }
        let path = directory.join(FILE);
        // SQLite gives its log and its shared memory the permissions of the database. If the file
        // cannot be written, SQLite reports it.
        let _ = private_file(&path);
        for beside in ["hapax.db-wal", "hapax.db-shm"].map(|name| directory.join(name)) {
            narrow(&beside, 0o600).map_err(io(&beside))?;
        }
        Ok(Self { path, value_bytes_max: STATEMENT_VALUE_BYTES_MAX, _lock: lock })
    }

    /// Sets the longest body. Statements of handlers may build values of twice that length.
    pub(super) fn for_bodies_of(mut self, max_body: usize) -> Self {
        self.value_bytes_max = STATEMENT_VALUE_BYTES_MAX.max(max_body.saturating_mul(2));
        self
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The longest text or blob that a handler's statement may read or build.
    pub(super) fn value_bytes_max(&self) -> usize {
        self.value_bytes_max
    }

    /// The connection that writes. There is one at a time.
    pub(super) fn writer(&self) -> rusqlite::Result<Connection> {
        let conn = Connection::open(&self.path)?;
        // The user may have the file open for reading: a brief lock must not fail the writer.
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        // It takes effect only on an empty file; a file of the user's keeps its page size.
        conn.pragma_update(None, "page_size", PAGE_BYTES)?;
        conn.pragma_update(None, "journal_mode", "wal")?;
        conn.pragma_update(None, "synchronous", durable())?;
        conn.pragma_update(None, "wal_autocheckpoint", 0)?;
        conn.pragma_update(None, "cache_size", -8_192)?;
        conn.pragma_update(None, "temp_store", "memory")?;
        conn.set_prepared_statement_cache_capacity(64);
        Ok(conn)
    }

    /// A connection that can only read.
    pub(super) fn reader(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags)?;
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        conn.pragma_update(None, "cache_size", -2_048)?;
        conn.pragma_update(None, "query_only", true)?;
        Ok(conn)
    }

    /// A connection for the checkpointer.
    pub(super) fn checkpointer(&self) -> rusqlite::Result<Connection> {
        let conn = Connection::open(&self.path)?;
        conn.pragma_update(None, "synchronous", durable())?;
        conn.pragma_update(None, "wal_autocheckpoint", 0)?;
        conn.pragma_update(None, "cache_size", -256)?;
        Ok(conn)
    }

    /// Writes the log over itself and syncs it. After a failed sync the system may treat unwritten
    /// pages as clean, and a later sync would skip them; pages that are written again are synced.
    pub(super) fn rewrite_log(&self) -> rusqlite::Result<()> {
        let mut log = self.path.clone().into_os_string();
        log.push("-wal");
        let rewrite = || -> io::Result<()> {
            let log = File::options().read(true).write(true).open(&log)?;
            let mut chunk = vec![0; REWRITE_BYTES];
            let mut at = 0;
            loop {
                let read = log.read_at(&mut chunk, at)?;
                if read == 0 {
                    return log.sync_data();
                }
                log.write_all_at(&chunk[..read], at)?;
                at += read as u64;
            }
        };
        rewrite().map_err(|error| {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_IOERR);
            rusqlite::Error::SqliteFailure(code, Some(format!("writing the log again: {error}")))
        })
    }

    pub(super) fn error(&self, source: rusqlite::Error) -> OpenError {
        OpenError::Sqlite { path: self.path.clone(), source }
    }
}

/// How a commit is synced. The test of power loss must fail without any sync, so it can turn it off.
pub(super) fn durable() -> &'static str {
    if tuned!("sqlite.unsynced", false) { "off" } else { "full" }
}

/// Moves the whole log into the database file and syncs that. Pages that a dead process had written
/// but not synced become durable here, before anything is answered from them. Returns false if a
/// reader blocked it.
pub(super) fn settle_log(conn: &Connection) -> rusqlite::Result<bool> {
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| Ok(row.get::<_, i64>(0)? == 0))
}

struct Migration {
    version: i64,
    name: &'static str,
    sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[
    Migration { version: 1, name: "events", sql: include_str!("migrations/0001_events.sql") },
    Migration { version: 2, name: "jobs", sql: include_str!("migrations/0002_jobs.sql") },
    Migration {
        version: 3,
        name: "young keys",
        sql: include_str!("migrations/0003_young_keys.sql"),
    },
    Migration { version: 4, name: "gaps", sql: include_str!("migrations/0004_gaps.sql") },
    Migration { version: 5, name: "publish", sql: include_str!("migrations/0005_publish.sql") },
    Migration { version: 6, name: "ledger", sql: include_str!("migrations/0006_ledger.sql") },
];

/// Migrates the schema forward to this build's version, one transaction each, and only if the
/// applied migrations are those that this build knows.
pub(super) fn migrate(place: &Place, conn: &mut Connection) -> Result<(), OpenError> {
    apply(place, conn, MIGRATIONS)
}

/// Refuses foreign keys to the tables of Hapax and triggers on them: they would make its writes
/// fail, or have unknown effects. Checked at the start, because only Hapax changes the schema while
/// it runs.
pub(super) fn refuse_entangled(place: &Place, conn: &Connection) -> Result<(), OpenError> {
    let found = conn
        .query_row(
            "SELECT 'the foreign key of ' || m.name, f.\"table\"
             FROM sqlite_schema m, pragma_foreign_key_list(m.name) f
             WHERE m.type = 'table' AND f.\"table\" LIKE 'hapax^_%' ESCAPE '^'
             UNION ALL
             SELECT 'the trigger ' || name, tbl_name FROM sqlite_schema
             WHERE type = 'trigger' AND tbl_name LIKE 'hapax^_%' ESCAPE '^'
               AND name NOT LIKE 'hapax^_%' ESCAPE '^'
             LIMIT 1",
            [],
            |row| Ok(OpenError::Entangled { theirs: row.get(0)?, ours: row.get(1)? }),
        )
        .optional()
        .map_err(|source| place.error(source))?;
    found.map_or(Ok(()), Err)
}

fn apply(place: &Place, conn: &mut Connection, known: &[Migration]) -> Result<(), OpenError> {
    let fail = |source| place.error(source);
    conn.execute_batch(
        "CREATE TABLE IF NOT EXISTS hapax_migration (
             version    INTEGER PRIMARY KEY,
             name       TEXT NOT NULL,
             checksum   TEXT NOT NULL,
             applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)",
    )
    .map_err(fail)?;
    let applied: Vec<(i64, String)> = {
        let mut rows = conn
            .prepare("SELECT version, checksum FROM hapax_migration ORDER BY version")
            .map_err(fail)?;
        let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).map_err(fail)?;
        rows.collect::<Result<_, _>>().map_err(fail)?
    };
    for (version, found) in &applied {
        match known.iter().find(|migration| migration.version == *version) {
            None => return Err(OpenError::Newer(*version)),
            Some(one) if checksum(one.sql) != *found => {
                return Err(OpenError::Migration { version: *version });
            }
            Some(_) => {}
        }
    }
    for migration in known {
        if applied.iter().any(|(version, _)| *version == migration.version) {
            continue;
        }
        let tx = conn
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(fail)?;
        tx.execute_batch(migration.sql).map_err(fail)?;
        tx.execute(
            "INSERT INTO hapax_migration (version, name, checksum) VALUES (?1, ?2, ?3)",
            (migration.version, migration.name, checksum(migration.sql)),
        )
        .map_err(fail)?;
        tx.commit().map_err(fail)?;
    }
    Ok(())
}

fn checksum(sql: &str) -> String {
    format!("{:?}", KeyHash::of(b"migration", [sql.as_bytes()]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_trigger_or_foreign_key_of_the_user_may_refer_to_a_table_of_hapax() {
        // A foreign key would prevent pruning, and a deferred one would break every ingest.
        let check = |sql: &str, refused: Option<&str>| {
            let directory = tempfile::tempdir().expect("a directory");
            let place = Place::own(directory.path()).expect("ours");
            let mut conn = place.writer().expect("opens");
            migrate(&place, &mut conn).expect("ours");
            conn.execute_batch(sql).expect("theirs");
            let outcome = refuse_entangled(&place, &conn).map_err(|error| error.to_string());
            match refused {
                None => assert_eq!(outcome, Ok(())),
                Some(what) => {
                    let outcome = outcome.expect_err(sql);
                    assert!(
                        outcome.contains(what) && outcome.to_lowercase().contains("hapax_"),
                        "{outcome}"
                    );
                }
            }
        };
        check("CREATE TABLE fees (event TEXT REFERENCES HAPAX_event (event_id))", Some("fees"));
        check("CREATE TABLE fees (seq, FOREIGN KEY (seq) REFERENCES hapax_event)", Some("fees"));
        check(
            "CREATE TABLE log (n); CREATE TRIGGER spy AFTER INSERT ON hapax_event
             BEGIN INSERT INTO log VALUES (1); END",
            Some("spy"),
        );
        check(
            "CREATE TABLE p (id INTEGER PRIMARY KEY); CREATE TABLE hapaxes (p REFERENCES p);
             CREATE TABLE c (p REFERENCES hapaxes);
             CREATE TRIGGER mine AFTER INSERT ON p BEGIN INSERT INTO c VALUES (NULL); END",
            None,
        );
    }

    #[test]
    fn a_database_of_an_older_hapax_is_migrated_with_its_data() {
        // Its held jobs have no deadline yet: without one, all would be overdue at once.
        for older in 1..MIGRATIONS.len() {
            let directory = tempfile::tempdir().expect("a directory");
            let place = Place::own(directory.path()).expect("ours");
            let mut conn = place.writer().expect("opens");
            apply(&place, &mut conn, &MIGRATIONS[..older]).expect("as it was");
            let has_jobs = older >= 2;
            if has_jobs {
                conn.execute_batch(
                    "INSERT INTO hapax_job (event_seq, lane, state, due_at, resource, position)
                     VALUES (1, 1, 5, 1000, 'acct', 3), (2, 1, 6, 1000, 'acct', 4)",
                )
                .expect("writes");
            }
            migrate(&place, &mut conn).expect("goes forward");
            let jobs: Vec<(i64, i64, i64)> = conn
                .prepare("SELECT state, due_at, forced FROM hapax_job")
                .expect("prepares")
                .query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
                .and_then(Iterator::collect)
                .expect("reads");
            let held_until = if older < 4 { 600_001_000 } else { 1_000 };
            let expected = [(5, held_until, 0), (6, 1_000, 0)];
            assert_eq!(jobs, if has_jobs { &expected[..] } else { &[] }, "from {older}");
            migrate(&place, &mut conn).expect("once is enough");
        }
    }
}
