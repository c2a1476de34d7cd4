//! The stored alerts in the model.

use std::collections::BTreeMap;

use hapax_core::Timestamp;
use hapax_core::alert_board::{AlertMoment, AlertReport, AlertsNoted, Silence, StoredAlert, note};
use hapax_core::store::{AlertRecords, CheckIn, CheckedIn, NodeRecord, SilenceAsk, StoreError};
use uuid::Uuid;

use super::work::later;
use super::{MemoryStore, Model};
use crate::known_nodes::KnownNodes;

/// The alerts by subject, the node that judges them, and the end of its lease.
#[derive(Debug, Default)]
pub(super) struct Alerts {
    rows: BTreeMap<String, StoredAlert>,
    judge: Option<(Uuid, Timestamp)>,
    nodes: KnownNodes,
}

impl AlertRecords for MemoryStore {
    async fn check_in(&self, checked: CheckIn) -> Result<CheckedIn, StoreError> {
        let CheckIn { node, name, lease, handlers } = checked;
        let now = self.now();
        let alerts = &mut self.model().alerts;
        let is_judge = alerts.judge.is_none_or(|(holder, until)| holder == node || until <= now);
        if is_judge {
            alerts.judge = Some((node, later(now, lease)));
        }
        let handlers = alerts.nodes.check_in(node, name, handlers, now);
        Ok(CheckedIn { is_judge, handlers })
    }

    async fn check_out(&self, node: Uuid) -> Result<(), StoreError> {
        self.model().alerts.nodes.check_out(node);
        Ok(())
    }

    async fn nodes(&self) -> Result<Vec<NodeRecord>, StoreError> {
        let now = self.now();
        Ok(self.model().alerts.nodes.listed(now))
    }

    async fn note_alerts(&self, report: AlertReport) -> Result<AlertsNoted, StoreError> {
        let noted = self.model().note_alerts(report, self.now());
        self.hint_deliveries();
        Ok(noted)
    }

    async fn alerts(&self) -> Result<Vec<StoredAlert>, StoreError> {
        let now = self.now();
        let model = self.model();
        let listed = model.alerts.rows.values().filter(|row| row.is_listed(now));
        Ok(listed.map(|row| shown(row, now)).collect())
    }

    async fn silence_alert(&self, ask: SilenceAsk) -> Result<Option<StoredAlert>, StoreError> {
        let now = self.now();
        let mut model = self.model();
        let Some(row) = model.alerts.rows.values_mut().find(|row| row.alert.key() == ask.id) else {
            return Ok(None);
        };
        let SilenceAsk { span, reason, who, .. } = ask;
        row.silence = Some(Silence { until: later(now, span), reason, who });
        Ok(Some(shown(row, now)))
    }
}

/// The alert; a silence that has ended is removed from it.
fn shown(row: &StoredAlert, now: Timestamp) -> StoredAlert {
    let silence = row.silence.clone().filter(|silence| silence.until > now);
    StoredAlert { silence, ..row.clone() }
}

impl Model {
    fn note_alerts(&mut self, report: AlertReport, now: Timestamp) -> AlertsNoted {
        let judge = self.alerts.judge;
        let moment = AlertMoment {
            now,
            holds_lease: judge.is_some_and(|(node, until)| node == report.node && until > now),
            is_wanted: self.wants_alerts(),
        };
        let changes = note(self.alerts.rows.values().cloned().collect(), report, moment);
        for subject in changes.deleted {
            self.alerts.rows.remove(&subject);
        }
        for row in changes.written {
            self.alerts.rows.insert(row.alert.subject.clone(), row);
        }
        for message in changes.published {
            self.publish_own(Some(message), now);
        }
        changes.noted
    }
}
