//! Named moments at which a test has the process die, compiled only with the feature `failpoints`.
//!
//! The one place in this crate that reads the environment, writes a file or ends the process: it
//! stands here because `store` and `engine` share nothing else, and a build without the feature has
//! none of it. `hapax`'s tests turn the feature on through its dev-dependencies; what ships, does not.
//!
//! - `HAPAX_FAILPOINTS="worker.before_commit=abort@3,…"`: abort at the third hit of that point;
//!   `abort:evt_1` instead aborts whenever that event passes it.
//! - `HAPAX_FAILPOINT_HITS=FILE`: one line with the point's name is appended for every hit, before
//!   anything dies, so that a test can tell that its point was reached.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::{Mutex, OnceLock};

/// The process passes this point, with this event where the point knows of one. Does nothing unless
/// the environment named above asks for it.
pub fn hit(name: &'static str, event_id: Option<&str>) {
    if let Some(armed) = ARMED.get_or_init(Armed::from_environment) {
        armed.hit(name, event_id);
    }
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

struct Armed {
    /// Which hit of which point is the last thing that happens.
    deaths: HashMap<String, Death>,
    hits: Option<File>,
    counts: Mutex<HashMap<&'static str, u64>>,
}

enum Death {
    AtHit(u64),
    WithEvent(String),
}

impl Armed {
    fn from_environment() -> Option<Self> {
        let plan = std::env::var("HAPAX_FAILPOINTS").ok();
        let file = std::env::var_os("HAPAX_FAILPOINT_HITS");
        if plan.is_none() && file.is_none() {
            return None;
        }
        let deaths = plan.unwrap_or_default().split(',').filter_map(death).collect();
        let hits = file.map(|path| {
            let opened = OpenOptions::new().create(true).append(true).open(path);
            opened.expect("the test names a file that can be written")
        });
        Some(Self { deaths, hits, counts: Mutex::default() })
    }

    fn hit(&self, name: &'static str, event_id: Option<&str>) {
        let mut counts = self.counts.lock().expect("nothing panics under this lock");
        let count = counts.entry(name).or_default();
        *count += 1;
        if let Some(mut hits) = self.hits.as_ref() {
            // One write, so that lines of several processes do not mix.
            let _ = hits.write_all(format!("{name}\n").as_bytes());
        }
        let dies = match self.deaths.get(name) {
            Some(Death::AtHit(at)) => count == at,
            Some(Death::WithEvent(poison)) => event_id == Some(poison),
            None => false,
        };
        if dies {
            std::process::abort();
        }
    }
}

/// `name=abort@N` or `name=abort:EVENT_ID`; a plan that says anything else is a mistake in the test.
fn death(part: &str) -> Option<(String, Death)> {
    if part.is_empty() {
        return None;
    }
    let read = || {
        let (name, death) = part.split_once('=')?;
        let death = match death.strip_prefix("abort:") {
            Some(event_id) => Death::WithEvent(event_id.to_owned()),
            None => Death::AtHit(death.strip_prefix("abort@")?.parse().ok()?),
        };
        Some((name.to_owned(), death))
    };
    Some(read().unwrap_or_else(|| panic!("HAPAX_FAILPOINTS: {part:?} is no death at a point")))
}
