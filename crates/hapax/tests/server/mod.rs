//! The real server, as senders, operators and attackers use it.

mod admin;
mod bad_input;
mod captured;
mod faults;
mod first_run;
mod once;
mod operate;
mod portal;
mod power_loss;
mod power_loss_sending;
mod rejections;
mod reload;
mod retry_storm;
mod search_crashes;
mod senders;
mod slow;
mod tenants;
