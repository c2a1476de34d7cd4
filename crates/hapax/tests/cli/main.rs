//! The commands of the binary, run as a user runs them.

#[path = "../common/mod.rs"]
mod common;
mod config_errors;
mod config_handlers;
mod demo;
mod operate;
mod send;
mod setup;
mod storm;
#[path = "../support/mod.rs"]
mod support;
mod verify;
