//! The examples of the repository, run as their READMEs say.

#[path = "../common/mod.rs"]
mod common;
mod postgres;
mod proxy;
mod receivers;
mod sqlite;
#[path = "../support/mod.rs"]
mod support;
