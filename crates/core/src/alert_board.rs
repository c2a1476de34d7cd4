//! The stored alerts, one for each subject, and the changes that a report of a node makes. The
//! decision is pure, so that all stores decide alike; a store only has to apply one report at a
//! time.
//!
//! An alert is *pending* when a round first finds its problem, and *raised* when a later round
//! still finds it. The alert is *cleared* once no round has found the problem for a while. So a brief
//! problem raises no alert, and a problem that comes and goes is one alert.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use crate::limits::ALERTS_CLEARED_MAX;
use crate::message::NewMessage;
use crate::own_messages::ActiveAlert;

/// The reporter of alerts that were found in the data of all nodes. One node at a time judges that data.
pub const JUDGE: Uuid = Uuid::nil();

/// An alert that no node has reported for this long is no longer listed: its node may have died.
pub const LISTED_FOR: SignedDuration = SignedDuration::from_secs(60);

/// The stage of an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlertState {
    /// One round has found the problem.
    Pending,
    /// The alert is shown and published.
    Raised,
    /// The problem is over; the alert is kept because it is silenced.
    Cleared,
}

impl AlertState {
    /// Its number in a database.
    pub fn code(self) -> i16 {
        match self {
            Self::Pending => 0,
            Self::Raised => 1,
            Self::Cleared => 2,
        }
    }

    /// The state with this number.
    pub fn from_code(code: i16) -> Option<Self> {
        [Self::Pending, Self::Raised, Self::Cleared].into_iter().find(|state| state.code() == code)
    }
}

/// The silence of an alert: an operator does not want to be notified of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Silence {
    /// The end.
    pub until: Timestamp,
    /// The reason.
    pub reason: String,
    /// The name of the token that was used.
    pub who: String,
}

/// One alert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredAlert {
    /// The subject, and the content at the last check.
    pub alert: ActiveAlert,
    /// The node that found it last, or [`JUDGE`].
    pub reporter: Uuid,
    /// Its stage.
    pub state: AlertState,
    /// Whether the last check of the reporter found it.
    pub is_found: bool,
    /// Whether the beginning of the alert was published.
    pub is_published: bool,
    /// The first check that found it.
    pub since: Timestamp,
    /// The last check that found it.
    pub seen_at: Timestamp,
    /// The silence of the alert, if it was silenced. The silence may have ended.
    pub silence: Option<Silence>,
}

impl StoredAlert {
    fn new(alert: ActiveAlert, reporter: Uuid, now: Timestamp) -> Self {
        Self {
            alert,
            reporter,
            state: AlertState::Pending,
            is_found: true,
            is_published: false,
            since: now,
            seen_at: now,
            silence: None,
        }
    }

    /// Whether the problem exists.
    pub fn is_listed(&self, now: Timestamp) -> bool {
        self.is_found
            && self.state != AlertState::Cleared
            && now.duration_since(self.seen_at) <= LISTED_FOR
    }

    /// Whether the alert is silenced, so that operators are not notified of it.
    pub fn is_silenced(&self, now: Timestamp) -> bool {
        self.silence.as_ref().is_some_and(|silence| silence.until > now)
    }

    /// Records a check that found it.
    fn record_found(&mut self, alert: ActiveAlert, reporter: Uuid, now: Timestamp) {
        if self.state == AlertState::Cleared {
            (self.state, self.since, self.is_published) = (AlertState::Pending, now, false);
        }
        (self.alert, self.reporter, self.is_found) = (alert, reporter, true);
        self.seen_at = self.seen_at.max(now);
    }
}

/// The problems that one node has found.
#[derive(Debug, Clone)]
pub struct AlertReport {
    /// The node.
    pub node: Uuid,
    /// The problems in the data of all nodes, if the node was their judge. These problems count only if the
    /// node still is the judge.
    pub judged: Option<Vec<ActiveAlert>>,
    /// The problems of the node itself.
    pub own: Vec<ActiveAlert>,
    /// The shortest time between the first check that found an alert and the check that raises it.
    pub raise_after: Duration,
    /// An alert that no check has found for longer than this is cleared.
    pub clear_after: Duration,
}

/// The result of a report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AlertsNoted {
    /// Whether the problems in the data of all nodes counted: the node was still the judge.
    pub judged: bool,
    /// Alerts that were raised.
    pub raised: Vec<ActiveAlert>,
    /// Alerts that were cleared.
    pub cleared: Vec<ActiveAlert>,
}

/// The changes that a store commits for a report, all of them or none.
#[derive(Debug, Default)]
pub struct AlertChanges {
    /// The answer to the report.
    pub noted: AlertsNoted,
    /// Rows to insert or to replace, sorted by subject.
    pub written: Vec<StoredAlert>,
    /// Subjects of rows to delete.
    pub deleted: Vec<String>,
    /// Messages to publish.
    pub published: Vec<NewMessage>,
}

/// The circumstances of a report, read at the same moment as the rows.
#[derive(Debug, Clone, Copy)]
pub struct AlertMoment {
    /// The time by the clock of the store.
    pub now: Timestamp,
    /// Whether the node that reports holds the lease of the judge.
    pub holds_lease: bool,
    /// Whether an endpoint wants messages about raised alerts.
    pub is_wanted: bool,
}

/// Decides what a report changes in `rows`, which are all stored alerts.
///
/// A raised alert is published once: at once, or when its silence ends or an endpoint wants it. Only an alert
/// whose raising was published is published as cleared.
pub fn note(rows: Vec<StoredAlert>, report: AlertReport, moment: AlertMoment) -> AlertChanges {
    let AlertMoment { now, holds_lease, is_wanted } = moment;
    let mut rows: BTreeMap<String, StoredAlert> =
        rows.into_iter().map(|row| (row.alert.subject.clone(), row)).collect();
    let mut changes = AlertChanges::default();
    changes.noted.judged = report.judged.is_some() && holds_lease;
    let judged = report.judged.filter(|_| holds_lease).map(|found| (JUDGE, found));
    let mut written = BTreeSet::new();
    for (reporter, found) in judged.into_iter().chain([(report.node, report.own)]) {
        let subjects: BTreeSet<String> = found.iter().map(|one| one.subject.clone()).collect();
        for alert in found {
            match rows.get_mut(&alert.subject) {
                Some(row) => row.record_found(alert, reporter, now),
                None => {
                    let row = StoredAlert::new(alert, reporter, now);
                    rows.insert(row.alert.subject.clone(), row);
                }
            }
        }
        for row in rows.values_mut().filter(|row| row.reporter == reporter) {
            if !subjects.contains(&row.alert.subject) && row.is_found {
                row.is_found = false;
                written.insert(row.alert.subject.clone());
            }
        }
        for subject in &subjects {
            let row = rows.get_mut(subject).expect("a row that was just seen");
            if row.state == AlertState::Pending && later(row.since, report.raise_after) <= now {
                row.state = AlertState::Raised;
                changes.noted.raised.push(row.alert.clone());
            }
            let is_due = row.state == AlertState::Raised && !row.is_published;
            if is_due && is_wanted && !row.is_silenced(now) {
                row.is_published = true;
                changes.published.push(row.alert.raised());
            }
        }
        written.extend(subjects);
    }
    for row in rows.values_mut() {
        // A node that is not the judge cannot know whether such an alert is over.
        if row.reporter == JUDGE && !changes.noted.judged {
            continue;
        }
        let is_over = match row.state {
            // One check only: there is nothing to clear.
            AlertState::Pending => !row.is_found || later(row.seen_at, report.clear_after) < now,
            AlertState::Raised => later(row.seen_at, report.clear_after) < now,
            AlertState::Cleared => !row.is_silenced(now),
        };
        if !is_over {
            continue;
        }
        if row.state == AlertState::Raised {
            if changes.noted.cleared.len() == ALERTS_CLEARED_MAX {
                continue;
            }
            changes.noted.cleared.push(row.alert.clone());
            changes.published.extend(row.is_published.then(|| row.alert.cleared()));
        }
        written.remove(&row.alert.subject);
        if row.is_silenced(now) {
            (row.state, row.is_found, row.is_published) = (AlertState::Cleared, false, false);
            written.insert(row.alert.subject.clone());
        } else {
            changes.deleted.push(row.alert.subject.clone());
        }
    }
    changes.written = written.iter().filter_map(|subject| rows.remove(subject)).collect();
    changes
}

fn later(at: Timestamp, span: Duration) -> Timestamp {
    let span = SignedDuration::try_from(span).ok();
    span.and_then(|span| at.checked_add(span).ok()).unwrap_or(Timestamp::MAX)
}
