//! The parameters that a statement can name, and the type of each in PostgreSQL. The store supplies
//! their values.

use crate::presets::edits;

/// A named parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum SqlParameter {
    Tenant,
    Source,
    EventId,
    EventType,
    Id,
    IdempotencyKey,
    Body,
    ReceivedAt,
    OccurredAt,
    Resource,
    Attempt,
    Current,
}

/// The type that a parameter is declared with in PostgreSQL, so that `:attempt + 1` and
/// `now() - :received_at` work without a cast. A cast makes another type: `:id::uuid`,
/// `:body::jsonb`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PostgresType {
    /// `text`.
    Text,
    /// `timestamptz`.
    Timestamptz,
    /// `int4`.
    Int4,
}

impl SqlParameter {
    /// All parameters, in the order in which error messages list them.
    pub const ALL: [Self; 12] = [
        Self::Tenant,
        Self::Source,
        Self::EventId,
        Self::EventType,
        Self::Id,
        Self::IdempotencyKey,
        Self::Body,
        Self::ReceivedAt,
        Self::OccurredAt,
        Self::Resource,
        Self::Attempt,
        Self::Current,
    ];

    /// Its name, without the colon.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Source => "source",
            Self::EventId => "event_id",
            Self::EventType => "event_type",
            Self::Id => "id",
            Self::IdempotencyKey => "idempotency_key",
            Self::Body => "body",
            Self::ReceivedAt => "received_at",
            Self::OccurredAt => "occurred_at",
            Self::Resource => "resource",
            Self::Attempt => "attempt",
            Self::Current => "current",
        }
    }

    /// Its type in PostgreSQL. `:id` is text although it is a UUID: users store ids of many kinds in text
    /// columns, and on SQLite it is text too.
    pub fn postgres_type(self) -> PostgresType {
        match self {
            Self::Tenant
            | Self::Source
            | Self::EventId
            | Self::EventType
            | Self::Id
            | Self::IdempotencyKey
            | Self::Body
            | Self::Resource
            | Self::Current => PostgresType::Text,
            Self::ReceivedAt | Self::OccurredAt => PostgresType::Timestamptz,
            Self::Attempt => PostgresType::Int4,
        }
    }

    pub(super) fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// The hint for an unknown name.
    pub(super) fn hint_for(name: &str) -> String {
        let plain = name.to_lowercase();
        let near = Self::ALL
            .into_iter()
            .map(|known| (edits(&plain, known.name()), known.name()))
            .filter(|(steps, _)| *steps <= (plain.len() / 3).max(1))
            .min();
        match near {
            Some((_, near)) => format!("did you mean :{near}? Known: {}", Self::known()),
            None => format!("known: {}", Self::known()),
        }
    }

    pub(super) fn known() -> String {
        Self::ALL.map(|known| format!(":{}", known.name())).join(" ")
    }
}

impl PostgresType {
    /// Its name as PostgreSQL writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Timestamptz => "timestamptz",
            Self::Int4 => "int4",
        }
    }
}
