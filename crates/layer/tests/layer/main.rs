//! The layer through the door that users use: requests into a tower stack, and answers out of it.
//!
//! What the work does is written down in a list that takes everything twice, so that a second run
//! shows; the keys are in the model of a ledger, watched by [`support::Watched`].

mod apart;
mod effects;
mod exits;
mod once;
mod own_transaction;
mod routers;
mod support;
mod waits;
