//! The limits of a handler's SQL on the writer's connection: it may change the user's tables, but
//! no table of Hapax; it has no transaction control, and a deadline.
//!
//! The deadline is checked between two steps of SQLite's virtual machine, and inside the functions
//! of [`super::functions`], which replace the built-in ones that could run for long. Any other
//! single step takes time in proportion to its input, and no value is longer than a bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rusqlite::hooks::{AuthAction, AuthContext, Authorization};
use rusqlite::limits::Limit;
use rusqlite::{Connection, ffi};

use super::functions;

/// The trigger through which a handler publishes: its only way to write to a table of Hapax.
const PUBLISH_TRIGGER: &str = "hapax_publish_insert";

/// How many steps of SQLite's virtual machine pass between two checks of the clock. One step may
/// copy a value of the full length, so the number is small.
const STEPS_PER_LOOK: i32 = 10;

/// How many arguments a function may have. SQLite reads a whole document for each path of a JSON
/// function, and cannot be interrupted between two paths.
const FUNCTION_ARGUMENTS_MAX: i32 = 64;

/// The limits of the connection; in force while a [`SandboxGuard`] exists.
#[derive(Debug, Clone)]
pub(super) struct Sandbox {
    inside: Arc<AtomicBool>,
    /// Whether a statement that was compiled under the limits can publish a message.
    publishes: Arc<AtomicBool>,
    deadline: Deadline,
    bytes_max: i32,
}

impl Sandbox {
    /// Adds the limits to a connection. No value that a statement reads or builds is longer than
    /// `bytes_max`.
    pub(super) fn on(conn: &mut Connection, bytes_max: usize) -> rusqlite::Result<Self> {
        let sandbox = Self {
            inside: Arc::default(),
            publishes: Arc::default(),
            deadline: Deadline::none(),
            bytes_max: i32::try_from(bytes_max).unwrap_or(i32::MAX),
        };
        let (inside, publishes) = (Arc::clone(&sandbox.inside), Arc::clone(&sandbox.publishes));
        conn.authorizer(Some(move |context: AuthContext<'_>| {
            if !inside.load(Ordering::Relaxed) {
                return Authorization::Allow;
            }
            if context.accessor == Some(PUBLISH_TRIGGER) {
                publishes.store(true, Ordering::Relaxed);
            }
            judge(&context)
        }))?;
        let deadline = sandbox.deadline.clone();
        conn.progress_handler(STEPS_PER_LOOK, Some(move || deadline.has_passed()))?;
        functions::replace_on(conn, &sandbox.deadline, bytes_max)?;
        conn.set_limit(Limit::SQLITE_LIMIT_FUNCTION_ARG, FUNCTION_ARGUMENTS_MAX)?;
        Ok(sandbox)
    }

    /// Whether a statement of a handler may have published a message. SQLite asks for permission when it
    /// compiles a statement, before the statement runs. It then also asks for all triggers that the statement
    /// can fire.
    pub(super) fn may_publish(&self) -> bool {
        self.publishes.load(Ordering::Relaxed)
    }

    /// Enables the limits on `conn`, the connection that they were added to, for at most `timeout`.
    pub(super) fn confine<'a>(
        &'a self,
        conn: &'a Connection,
        timeout: Duration,
    ) -> rusqlite::Result<SandboxGuard<'a>> {
        let length_max = conn.limit(Limit::SQLITE_LIMIT_LENGTH)?;
        conn.set_limit(Limit::SQLITE_LIMIT_LENGTH, self.bytes_max)?;
        self.deadline.set(timeout);
        self.inside.store(true, Ordering::Relaxed);
        Ok(SandboxGuard { sandbox: self, conn, length_max })
    }
}

/// The limits hold while this exists.
pub(super) struct SandboxGuard<'a> {
    sandbox: &'a Sandbox,
    conn: &'a Connection,
    /// The length limit for statements of Hapax.
    length_max: i32,
}

impl SandboxGuard<'_> {
    /// Whether the deadline has passed.
    pub(super) fn timed_out(&self) -> bool {
        self.sandbox.deadline.has_passed()
    }
}

impl Drop for SandboxGuard<'_> {
    fn drop(&mut self) {
        self.sandbox.inside.store(false, Ordering::Relaxed);
        self.sandbox.deadline.clear();
        // The value was read from this connection, so SQLite accepts it.
        drop(self.conn.set_limit(Limit::SQLITE_LIMIT_LENGTH, self.length_max));
    }
}

/// The deadline of the statements.
#[derive(Debug, Clone)]
pub(super) struct Deadline {
    /// Microseconds after `began`.
    at: Arc<AtomicU64>,
    began: Instant,
}

impl Deadline {
    fn none() -> Self {
        Self { at: Arc::new(AtomicU64::new(u64::MAX)), began: Instant::now() }
    }

    fn set(&self, timeout: Duration) {
        let timeout = u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX);
        self.at.store(micros_since(self.began).saturating_add(timeout), Ordering::Relaxed);
    }

    fn clear(&self) {
        self.at.store(u64::MAX, Ordering::Relaxed);
    }

    fn has_passed(&self) -> bool {
        let at = self.at.load(Ordering::Relaxed);
        // Statements of Hapax have no deadline: the clock is not read for them.
        at != u64::MAX && micros_since(self.began) > at
    }

    /// Returns an error after the deadline.
    pub(super) fn check(&self) -> rusqlite::Result<()> {
        if self.has_passed() {
            let interrupted = ffi::Error::new(ffi::SQLITE_INTERRUPT);
            return Err(rusqlite::Error::SqliteFailure(interrupted, None));
        }
        Ok(())
    }
}

fn micros_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX)
}

fn judge(context: &AuthContext<'_>) -> Authorization {
    let ours =
        |table: &str| table.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("hapax_"));
    let publishing = context.accessor == Some(PUBLISH_TRIGGER);
    match context.action {
        AuthAction::Insert { table_name } => {
            let is_publish = table_name.eq_ignore_ascii_case("hapax_publish");
            if ours(table_name) && !is_publish && !publishing {
                return Authorization::Deny;
            }
            Authorization::Allow
        }
        AuthAction::Update { table_name, .. } | AuthAction::Delete { table_name } => {
            if ours(table_name) { Authorization::Deny } else { Authorization::Allow }
        }
        // A stored answer is for its client, not for handlers.
        AuthAction::Read { table_name, .. } => {
            if table_name.eq_ignore_ascii_case("hapax_reservation") {
                return Authorization::Deny;
            }
            // A single step over this table reads the whole file.
            if table_name.eq_ignore_ascii_case("dbstat") {
                return Authorization::Deny;
            }
            Authorization::Allow
        }
        AuthAction::Select | AuthAction::Recursive => Authorization::Allow,
        AuthAction::Function { function_name } => {
            if function_name.eq_ignore_ascii_case("load_extension") {
                return Authorization::Deny;
            }
            Authorization::Allow
        }
        // Transaction control, ATTACH, DETACH, PRAGMA and every change of the schema: every action
        // that is not named above, including those of future SQLite versions.
        _ => Authorization::Deny,
    }
}
