//! Dead letters, grouped by their error.

use hapax_core::Timestamp;
use hapax_core::store::{DeadGroup, DeadGroups};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// The query of `GET /api/v1/dead`.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeadLettersQuery {
    /// Only dead letters of this tenant.
    pub(crate) tenant: Option<String>,
    /// Only dead letters of this source.
    pub(crate) source: Option<String>,
    /// Only dead letters of this handler.
    pub(crate) handler: Option<String>,
    /// The most errors to list.
    #[param(minimum = 1, maximum = 500, default = 50)]
    pub(crate) limit: Option<usize>,
}

/// Dead letters by their error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DeadLetters {
    /// The errors with the most dead letters.
    pub(crate) items: Vec<DeadLetterGroup>,
    /// How many dead letters were counted, those of other errors included.
    pub(crate) count: u64,
    /// How many different errors they have.
    pub(crate) error_count: u64,
    /// Set if counting took long and stopped: dead letters of events that were received before this time are not
    /// counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) searched_to: Option<Timestamp>,
    /// Always null: the list has one page.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// Dead letters with the same error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct DeadLetterGroup {
    /// The error of the last attempt.
    pub(crate) error: String,
    pub(crate) count: u64,
    /// When the first of them ended.
    pub(crate) first_at: Timestamp,
    /// When the last of them ended.
    pub(crate) last_at: Timestamp,
}

impl From<DeadGroups> for DeadLetters {
    fn from(DeadGroups { groups, letters, errors, searched_to }: DeadGroups) -> Self {
        let group = |DeadGroup { error, count, first, last }| DeadLetterGroup {
            error,
            count,
            first_at: first,
            last_at: last,
        };
        Self {
            items: groups.into_iter().map(group).collect(),
            count: letters,
            error_count: errors,
            searched_to,
            next: None,
        }
    }
}
