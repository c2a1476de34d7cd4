//! What a handler's SQL may do on the writer's connection: anything to the user's tables, nothing to
//! ours, no transaction control, and not for long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::hooks::{AuthAction, AuthContext, Authorization};

/// The trigger through which a handler publishes: the only way into a table of ours.
const PUBLISH_TRIGGER: &str = "hapax_publish_insert";

/// How many steps of SQLite's machine pass between two looks at the clock.
const STEPS_PER_LOOK: i32 = 1_000;

/// The limits of the connection they were put on; in force while a [`Confined`] lives.
#[derive(Debug, Clone)]
pub(super) struct Sandbox {
    inside: Arc<AtomicBool>,
    /// Microseconds after `began`; nothing runs past it.
    deadline: Arc<AtomicU64>,
    began: Instant,
}

impl Sandbox {
    /// Puts the limits on a connection.
    pub(super) fn on(conn: &mut Connection) -> rusqlite::Result<Self> {
        let sandbox = Self {
            inside: Arc::default(),
            deadline: Arc::new(AtomicU64::new(u64::MAX)),
            began: Instant::now(),
        };
        let inside = Arc::clone(&sandbox.inside);
        conn.authorizer(Some(move |context: AuthContext<'_>| {
            if inside.load(Ordering::Relaxed) { judge(&context) } else { Authorization::Allow }
        }))?;
        let (deadline, began) = (Arc::clone(&sandbox.deadline), sandbox.began);
        conn.progress_handler(
            STEPS_PER_LOOK,
            Some(move || micros_since(began) > deadline.load(Ordering::Relaxed)),
        )?;
        Ok(sandbox)
    }

    /// From here on the limits hold, for at most `timeout`.
    pub(super) fn confine(&self, timeout: Duration) -> Confined<'_> {
        let timeout = u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX);
        let end = micros_since(self.began).saturating_add(timeout);
        self.deadline.store(end, Ordering::Relaxed);
        self.inside.store(true, Ordering::Relaxed);
        Confined(self)
    }
}

/// While this lives, the limits hold.
pub(super) struct Confined<'a>(&'a Sandbox);

impl Confined<'_> {
    /// Whether the time was up.
    pub(super) fn timed_out(&self) -> bool {
        micros_since(self.0.began) > self.0.deadline.load(Ordering::Relaxed)
    }
}

impl Drop for Confined<'_> {
    fn drop(&mut self) {
        self.0.inside.store(false, Ordering::Relaxed);
        self.0.deadline.store(u64::MAX, Ordering::Relaxed);
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
            let door = table_name.eq_ignore_ascii_case("hapax_publish");
            if ours(table_name) && !door && !publishing {
                return Authorization::Deny;
            }
            Authorization::Allow
        }
        AuthAction::Update { table_name, .. } | AuthAction::Delete { table_name } => {
            if ours(table_name) { Authorization::Deny } else { Authorization::Allow }
        }
        // What somebody's client was answered is for that client, not for the work of an event.
        AuthAction::Read { table_name, .. } => {
            if table_name.eq_ignore_ascii_case("hapax_reservation") {
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
        // Transaction control, ATTACH, DETACH, PRAGMA, and every change of the schema: whatever is
        // not named above, known to this version of SQLite or not.
        _ => Authorization::Deny,
    }
}
