//! The examples of the repository, run as their READMEs say.

mod full_loop;
mod postgres;
mod proxy;
mod receivers;
mod sqlite;
