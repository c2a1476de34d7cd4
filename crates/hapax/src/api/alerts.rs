//! Alerts.

use hapax_core::Timestamp;
use hapax_core::alert_board::Silence;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Span;

/// The active alerts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AlertList {
    /// The most severe first, and those that are silenced last.
    pub(crate) items: Vec<Alert>,
    /// Always null: the list is whole.
    #[schema(required)]
    pub(crate) next: Option<String>,
    pub(crate) reach: AlertReach,
}

/// Whether alerts are delivered to any endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AlertReach {
    /// Endpoints of the tenant `hapax` that subscribe to alerts and are neither disabled nor failing; 0 if there is a
    /// `problem`.
    pub(crate) endpoints: usize,
    /// Why alerts reach no endpoint, if that is the case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

/// A condition that needs attention, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Alert {
    /// The id of the alert while it is active, for `POST /api/v1/alerts/{id}/silence`.
    #[serde(default)]
    pub(crate) id: String,
    /// The key of `[alerts]` in the config.
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<String>,
    /// `source/handler`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lane: Option<String>,
    /// The id of an endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) endpoint: Option<String>,
    pub(crate) severity: Severity,
    pub(crate) since: Timestamp,
    pub(crate) message: String,
    /// Whether the beginning of the alert was published to endpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) notified: Option<bool>,
    /// The end and the reason of its silence, if it is silenced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) silenced: Option<AlertSilence>,
}

/// The silence of an alert.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AlertSilence {
    pub(crate) until: Timestamp,
    pub(crate) reason: String,
    /// The name of the token that was used.
    pub(crate) who: String,
}

impl From<Silence> for AlertSilence {
    fn from(silence: Silence) -> Self {
        let Silence { until, reason, who } = silence;
        Self { until, reason, who }
    }
}

/// How urgent an alert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Severity {
    /// No action needed.
    Info,
    /// Needs attention today.
    Warning,
    /// Needs attention now.
    Critical,
}

impl Severity {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// The body of `POST /api/v1/alerts/{id}/silence`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SilenceRequest {
    /// How long the alert publishes no messages, at most 31 days; `0s` ends its silence.
    pub(crate) r#for: Span,
    /// Why. Only the end of a silence needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// The answer to `POST /api/v1/alerts/test`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct TestedAlerts {
    /// The deliveries that were written: two for each endpoint that subscribes to alerts.
    pub(crate) deliveries: usize,
    /// The messages that were published: the test alert is raised and cleared.
    pub(crate) messages: Vec<String>,
    pub(crate) reach: AlertReach,
}
