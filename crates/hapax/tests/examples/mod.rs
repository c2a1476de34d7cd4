//! The examples of the repository, run as their READMEs say.

mod postgres;
mod proxy;
mod receivers;
mod sqlite;
