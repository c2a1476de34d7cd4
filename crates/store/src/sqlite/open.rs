//! Opens the database file: checks the version of SQLite, takes the lock that makes this process
//! the only owner, applies the settings that make a commit durable, and migrates.

use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use hapax_core::{KeyHash, tuned};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};

use super::log_rewrite::{self, RewriteError};
use super::log_writes;
use super::transaction::Transaction;
use crate::file_permissions::{narrow, private_dir, private_file};
use crate::limits::{PAGE_BYTES, STATEMENT_VALUE_BYTES_MAX};

/// SQLite below this can lose committed writes of a write-ahead log.
const SQLITE_VERSION_MIN: i32 = 3_051_003;

/// The file that the user and Hapax share.
pub(super) const FILE: &str = "hapax.db";

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
    /// Another process owns the data directory.
    #[error("{0} is in use by another hapax process; one process owns a data directory")]
    InUse(PathBuf),
    /// The linked SQLite version can lose data.
    #[error("SQLite {0} can lose committed writes; 3.51.3 or newer is needed")]
    Version(String),
    /// A migration was changed after it was applied.
    #[error(
        "migration {version} in this database is not the one this hapax knows; \
         it was written by another build, or changed by hand: use that build, or another data directory"
    )]
    Migration {
        /// The version of the migration.
        version: i64,
    },
    /// The file is older than the first release.
    #[error(
        "a version from before the first release made {0}, and its tables cannot be migrated: use an \
         empty data directory, and copy your own tables with `sqlite3 {0} .dump`"
    )]
    BeforeRelease(PathBuf),
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
    #[error(
        "this database was written by a newer hapax (migration {0}): start that version or a later one"
    )]
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
pub(super) struct DatabaseLocation {
    path: PathBuf,
    value_bytes_max: usize,
    _lock: File,
}

impl DatabaseLocation {
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
        let vfs = log_writes::vfs()?;
        let conn = Connection::open_with_flags_and_vfs(&self.path, OpenFlags::default(), vfs)?;
        settle_only_on_request(&conn)?;
        // The user may have the file open for reading: a brief lock must not fail the writer.
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        // The setting takes effect only on an empty file; a file that the user created keeps its
        // page size.
        conn.pragma_update(None, "page_size", PAGE_BYTES)?;
        conn.pragma_update(None, "journal_mode", "wal")?;
        conn.pragma_update(None, "synchronous", durable())?;
        conn.pragma_update(None, "wal_autocheckpoint", 0)?;
        conn.pragma_update(None, "cache_size", -2_048)?;
        conn.pragma_update(None, "temp_store", "memory")?;
        stable_plans(&conn)?;
        // The cache holds all statements of Hapax, and has room for those of handlers.
        conn.set_prepared_statement_cache_capacity(192);
        Ok(conn)
    }

    /// A connection that can only read.
    pub(super) fn reader(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let conn = Connection::open_with_flags(&self.path, flags)?;
        conn.busy_timeout(std::time::Duration::from_secs(5))?;
        conn.pragma_update(None, "cache_size", -2_048)?;
        conn.pragma_update(None, "query_only", true)?;
        stable_plans(&conn)?;
        Ok(conn)
    }

    /// A connection for the checkpointer.
    pub(super) fn checkpointer(&self) -> rusqlite::Result<Connection> {
        let conn = Connection::open(&self.path)?;
        settle_only_on_request(&conn)?;
        conn.pragma_update(None, "synchronous", durable())?;
        conn.pragma_update(None, "wal_autocheckpoint", 0)?;
        conn.pragma_update(None, "cache_size", -256)?;
        Ok(conn)
    }

    /// Makes the log durable again. `committed` is the number of pages in it that this process has committed.
    pub(super) fn rewrite_log(&self, committed: u32) -> Result<(), RewriteError> {
        log_rewrite::rewrite(&self.log(), committed)
    }

    /// Makes the log of a process that has ended durable. A sync of that process may have failed: then no
    /// other sync writes those pages, and they would be copied from memory into the database file.
    pub(super) fn rewrite_old_log(&self, conn: &Connection) -> Result<(), OpenError> {
        // The user's own program may still have the file open for writing.
        let _no_other_writer = Transaction::begin(conn).map_err(|source| self.error(source))?;
        match log_rewrite::rewrite(&self.log(), 0) {
            Err(RewriteError::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Ok(()) => Ok(()),
            Err(error) => Err(OpenError::Io { path: self.log(), source: io::Error::other(error) }),
        }
    }

    fn log(&self) -> PathBuf {
        let mut log = self.path.clone().into_os_string();
        log.push("-wal");
        log.into()
    }

    pub(super) fn error(&self, source: rusqlite::Error) -> OpenError {
        OpenError::Sqlite { path: self.path.clone(), source }
    }
}

/// Keeps SQLite from copying the log into the file when the last connection closes: after a failed sync the log may
/// have holes on disk.
fn settle_only_on_request(conn: &Connection) -> rusqlite::Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map(|_| ())
}

/// A plan never depends on the values that a statement is given. Otherwise SQLite reads these
/// values when it plans, and plans the statement again for each new `LIMIT`.
fn stable_plans(conn: &Connection) -> rusqlite::Result<()> {
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map(|_| ())
}

/// How a commit is synced. The test of power loss must fail if nothing is synced, so a test can
/// turn syncs off.
pub(super) fn durable() -> &'static str {
    if tuned!("sqlite.unsynced", false) { "off" } else { "full" }
}

/// Moves the whole log into the database file and syncs the file. Pages that a dead process had
/// written but not synced become durable here, before anything is answered from them. Returns false
/// if a reader blocked it.
pub(super) fn settle_log(conn: &Connection) -> rusqlite::Result<bool> {
    conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| Ok(row.get::<_, i64>(0)? == 0))
}

struct Migration {
    version: i64,
    name: &'static str,
    sql: &'static str,
}

/// The first migration. A file that was made before the first release has a first migration of another name.
const BASELINE: &str = "baseline";

/// All migrations, in order. A migration that has been released is never edited.
const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, name: BASELINE, sql: include_str!("migrations/0001_baseline.sql") }];

/// Migrates the schema forward to this build's version, one transaction each, and only if the
/// applied migrations are those that this build knows.
pub(super) fn migrate(location: &DatabaseLocation, conn: &mut Connection) -> Result<(), OpenError> {
    apply(location, conn, MIGRATIONS)
}

/// Refuses foreign keys to the tables of Hapax and triggers on them: they would make the writes of
/// Hapax fail, or have unknown effects. Checked at the start, because only Hapax changes the schema
/// while it runs.
pub(super) fn refuse_entangled(
    location: &DatabaseLocation,
    conn: &Connection,
) -> Result<(), OpenError> {
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
        .map_err(|source| location.error(source))?;
    found.map_or(Ok(()), Err)
}

fn apply(
    location: &DatabaseLocation,
    conn: &mut Connection,
    known: &[Migration],
) -> Result<(), OpenError> {
    let fail = |source| location.error(source);
    conn.execute_batch(
        "CREATE TABLE IF NOT EXISTS hapax_migration (
             version    INTEGER PRIMARY KEY,
             name       TEXT NOT NULL,
             checksum   TEXT NOT NULL,
             applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP)",
    )
    .map_err(fail)?;
    let applied: Vec<(i64, String, String)> = {
        let mut rows = conn
            .prepare("SELECT version, name, checksum FROM hapax_migration ORDER BY version")
            .map_err(fail)?;
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        let rows = rows.query_map([], read).map_err(fail)?;
        rows.collect::<Result<_, _>>().map_err(fail)?
    };
    for (version, name, found) in &applied {
        match known.iter().find(|migration| migration.version == *version) {
            None => return Err(OpenError::Newer(*version)),
            Some(_) if *version == 1 && name != BASELINE => {
                return Err(OpenError::BeforeRelease(location.path.clone()));
            }
            Some(one) if checksum(one.sql) != *found => {
                return Err(OpenError::Migration { version: *version });
            }
            Some(_) => {}
        }
    }
    for migration in known {
        if applied.iter().any(|(version, ..)| *version == migration.version) {
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
    fn a_statement_is_planned_once_whatever_its_limit() {
        let directory = tempfile::tempdir().expect("a directory");
        let location = DatabaseLocation::own(directory.path()).expect("ours");
        let writer = location.writer().expect("opens");
        writer.execute_batch("CREATE TABLE fees (n INTEGER)").expect("a table");
        for conn in [&writer, &location.reader().expect("opens")] {
            let mut fees = conn.prepare("SELECT n FROM fees LIMIT ?1").expect("prepares");
            for limit in 1..4 {
                assert!(fees.query([limit]).expect("runs").next().expect("reads").is_none());
            }
            assert_eq!(fees.get_status(rusqlite::StatementStatus::RePrepare), 0);
        }
    }

    #[test]
    fn no_trigger_or_foreign_key_of_the_user_may_refer_to_a_table_of_hapax() {
        // A foreign key would prevent pruning, and a deferred one would break every ingest.
        let check = |sql: &str, refused: Option<&str>| {
            let directory = tempfile::tempdir().expect("a directory");
            let location = DatabaseLocation::own(directory.path()).expect("ours");
            let mut conn = location.writer().expect("opens");
            migrate(&location, &mut conn).expect("ours");
            conn.execute_batch(sql).expect("theirs");
            let outcome = refuse_entangled(&location, &conn).map_err(|error| error.to_string());
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

    fn migration_two(sql: &'static str) -> [Migration; 2] {
        let [baseline] = MIGRATIONS else { panic!("there is a second migration: test that one") };
        let Migration { version, name, sql: first } = *baseline;
        [Migration { version, name, sql: first }, Migration { version: 2, name: "next", sql }]
    }

    #[test]
    fn the_next_migration_keeps_what_the_database_holds_and_runs_once() {
        // A file with events is opened by the next version, twice, then by the version before.
        let directory = tempfile::tempdir().expect("a directory");
        let location = DatabaseLocation::own(directory.path()).expect("ours");
        let mut conn = location.writer().expect("opens");
        migrate(&location, &mut conn).expect("as it was");
        conn.execute_batch("INSERT INTO hapax_pair VALUES (7, 'default', 'shop')").expect("writes");
        let next = migration_two(
            "ALTER TABLE hapax_pair ADD COLUMN seen INTEGER NOT NULL DEFAULT 0;
             UPDATE hapax_pair SET seen = seen + 1;",
        );
        for _ in 0..2 {
            apply(&location, &mut conn, &next).expect("goes forward");
            let row: (i64, String, i64) = conn
                .query_row("SELECT pair, source, seen FROM hapax_pair", [], |row| {
                    Ok((row.get(0)?, row.get(1)?, row.get(2)?))
                })
                .expect("reads");
            assert_eq!(row, (7, "shop".to_owned(), 1));
        }
        assert!(matches!(migrate(&location, &mut conn), Err(OpenError::Newer(2))));
    }

    #[test]
    fn a_migration_that_fails_leaves_the_database_as_it_was() {
        // The migration fails when half of it has run: the previous version must still open the
        // file.
        let directory = tempfile::tempdir().expect("a directory");
        let location = DatabaseLocation::own(directory.path()).expect("ours");
        let mut conn = location.writer().expect("opens");
        migrate(&location, &mut conn).expect("as it was");
        let next = migration_two("DROP TABLE hapax_copy; INSERT INTO nowhere VALUES (1);");
        apply(&location, &mut conn, &next).expect_err("fails");
        migrate(&location, &mut conn).expect("as it was");
        conn.execute_batch("SELECT conflicts FROM hapax_copy").expect("is there");
    }

    #[test]
    fn a_database_from_before_the_first_release_is_refused_and_stays_as_it_is() {
        // The tables of such a database have the same names and other columns: the first write
        // would fail or store wrong values.
        let directory = tempfile::tempdir().expect("a directory");
        let location = DatabaseLocation::own(directory.path()).expect("ours");
        let mut conn = location.writer().expect("opens");
        conn.execute_batch(
            "CREATE TABLE hapax_migration (version INTEGER PRIMARY KEY, name TEXT NOT NULL,
                 checksum TEXT NOT NULL, applied_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP);
             INSERT INTO hapax_migration (version, name, checksum)
             VALUES (1, 'events', 'a'), (2, 'jobs', 'b');
             CREATE TABLE hapax_event (seq INTEGER PRIMARY KEY);
             INSERT INTO hapax_event VALUES (1)",
        )
        .expect("an old one");
        let refused = migrate(&location, &mut conn).expect_err("refused");
        assert!(matches!(refused, OpenError::BeforeRelease(_)), "{refused}");
        let text = refused.to_string();
        assert!(text.contains("empty data directory") && text.contains("hapax.db"), "{text}");
        let count = "SELECT count(*) FROM hapax_event, sqlite_schema";
        let count: i64 = conn.query_row(count, [], |row| row.get(0)).expect("reads");
        assert_eq!(count, 2, "it changed something");
    }
}
