//! Named points at which a test aborts or stops the process. Compiled only with the feature
//! `failpoints`.
//!
//! This is the only file of the crate that reads the environment, writes a file or ends the process.
//! The file is in this crate because `store` and `engine` share no other crate. The tests of `hapax`
//! enable the feature through its dev-dependencies; the shipped binary does not have it.
//!
//! - `HAPAX_FAILPOINTS="worker.before_commit=abort@3,…"`: abort at the third hit of that point;
//!   `abort:evt_1` instead aborts whenever that event passes the point; `stop@3` stops the process
//!   (SIGSTOP) until it gets a SIGCONT.
//! - `HAPAX_FAILPOINT_HITS=FILE`: every hit appends a line with the point's name, before the process
//!   aborts or stops, so that a test can check that its point was reached.
//! - `HAPAX_TEST_SETTINGS="sqlite.fresh_keys=30,…"`: other values for constants, so that an hourly
//!   act happens within a test. See [`crate::tuned`].

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

/// Records that the process passes this point, with its event if it has one, and runs the action that
/// the environment sets for it. Without those variables the point does nothing.
pub fn hit(name: &'static str, event_id: Option<&str>) {
    if let Some(armed) = ARMED.get_or_init(ActiveFailpoints::from_environment) {
        armed.hit(name, event_id);
    }
}

/// The value of a setting in `HAPAX_TEST_SETTINGS`.
///
/// # Panics
/// When the value does not parse: a mistake in the test.
pub fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    static GIVEN: OnceLock<String> = OnceLock::new();
    let given = GIVEN.get_or_init(|| std::env::var("HAPAX_TEST_SETTINGS").unwrap_or_default());
    let (_, value) =
        given.split(',').filter_map(|one| one.split_once('=')).find(|(known, _)| *known == name)?;
    Some(value.parse().unwrap_or_else(|_| panic!("HAPAX_TEST_SETTINGS: {name}={value}")))
}

static ARMED: OnceLock<Option<ActiveFailpoints>> = OnceLock::new();

struct ActiveFailpoints {
    /// The action of each point.
    actions: HashMap<String, FailpointAction>,
    hits: Option<File>,
    counts: Mutex<HashMap<&'static str, u64>>,
}

enum FailpointAction {
    AbortAt(u64),
    AbortWith(String),
    StopAt(u64),
}

impl ActiveFailpoints {
    fn from_environment() -> Option<Self> {
        let plan = std::env::var("HAPAX_FAILPOINTS").ok();
        let file = std::env::var_os("HAPAX_FAILPOINT_HITS");
        if plan.is_none() && file.is_none() {
            return None;
        }
        let actions = plan.unwrap_or_default().split(',').filter_map(action).collect();
        let hits = file.map(|path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.expect("the test names a file that can be written")
        });
        Some(Self { actions, hits, counts: Mutex::default() })
    }

    fn hit(&self, name: &'static str, event_id: Option<&str>) {
        let mut counts = self.counts.lock().expect("nothing panics under this lock");
        let count = counts.entry(name).or_default();
        *count += 1;
        if let Some(mut hits) = self.hits.as_ref() {
            // One write, so that lines of several processes do not mix.
            let _ = hits.write_all(format!("{name}\n").as_bytes());
        }
        match self.actions.get(name) {
            Some(FailpointAction::AbortAt(at)) if count == at => std::process::abort(),
            Some(FailpointAction::AbortWith(poison)) if event_id == Some(poison) => {
                std::process::abort()
            }
            Some(FailpointAction::StopAt(at)) if count == at => stop(),
            Some(
                FailpointAction::AbortAt(_)
                | FailpointAction::AbortWith(_)
                | FailpointAction::StopAt(_),
            )
            | None => {}
        }
    }
}

/// Stops the whole process, and returns after SIGCONT. The signal goes to this thread: another thread might
/// handle it only after this one has continued.
fn stop() {
    let own = std::fs::read_link("/proc/thread-self").expect("there is a /proc");
    let thread = own.file_name().and_then(|name| name.to_str()).expect("it ends in a number");
    let stopped = Command::new("sh").args(["-c", &format!("kill -STOP {thread}")]).status();
    assert!(stopped.is_ok_and(|status| status.success()), "there is a shell to stop us");
}

/// Parses `name=abort@N`, `name=abort:EVENT_ID` or `name=stop@N`. Any other text is a mistake in the
/// test and panics.
fn action(part: &str) -> Option<(String, FailpointAction)> {
    if part.is_empty() {
        return None;
    }
    let read = || {
        let (name, what) = part.split_once('=')?;
        let action = match (what.strip_prefix("abort:"), what.split_once('@')) {
            (Some(event_id), _) => FailpointAction::AbortWith(event_id.to_owned()),
            (None, Some(("abort", at))) => FailpointAction::AbortAt(at.parse().ok()?),
            (None, Some(("stop", at))) => FailpointAction::StopAt(at.parse().ok()?),
            (None, _) => return None,
        };
        Some((name.to_owned(), action))
    };
    Some(read().unwrap_or_else(|| panic!("HAPAX_FAILPOINTS: {part:?} is not an action at a point")))
}
