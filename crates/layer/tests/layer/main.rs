//! Tests of the layer as users use it: requests to a tower stack, and its answers.
//!
//! The work adds its effects to a list without a unique constraint, so that a second run is visible. The keys are
//! in the memory ledger, wrapped by [`support::TestLedger`].

mod callers;
mod effects;
mod once;
mod outcomes;
mod own_transaction;
mod routers;
mod support;
mod waits;
