//! `hapax providers`: the presets for known senders, and a config block for each.

use std::collections::BTreeMap;

use hapax_core::presets::{self, Preset};
use serde::Serialize;

use super::output::{self, CommandFailure, Exit};
use crate::signing;

/// `hapax providers`.
#[derive(Debug, clap::Args)]
pub(super) struct Providers {
    /// Describe this sender in full
    name: Option<String>,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Providers {
    pub(super) fn run(self) -> Result<Exit, CommandFailure> {
        match (&self.name, self.json) {
            (None, true) => {
                for preset in presets::all() {
                    output::json(&PresetDescription::of(preset))?;
                }
            }
            (None, false) => table()?,
            (Some(name), true) => output::json(&PresetDescription::of(find(name)?))?,
            (Some(name), false) => in_full(&PresetDescription::of(find(name)?))?,
        }
        Ok(Exit::Done)
    }
}

fn find(name: &str) -> Result<&'static Preset, CommandFailure> {
    presets::find(name).ok_or_else(|| {
        let hint = match presets::nearest(name) {
            Some(near) => format!("did you mean \"{near}\"? `hapax providers` lists all senders"),
            None => "`hapax providers` lists all senders".to_owned(),
        };
        CommandFailure::usage(format!("unknown provider \"{}\"", output::shown(name)), hint)
    })
}

/// A preset as it is printed.
#[derive(Debug, Serialize)]
struct PresetDescription {
    name: &'static str,
    title: &'static str,
    scheme: String,
    signed: &'static str,
    not_signed: &'static str,
    replay_guard: String,
    secret: &'static str,
    event_id: String,
    event_type: String,
    retries: &'static str,
    /// The waits before each retry in seconds, and the page that documents them; `None` if the
    /// sender documents none.
    retry_waits_seconds: Option<&'static [u64]>,
    retries_documented_at: Option<&'static str>,
    tolerance: &'static str,
    signs_retries_afresh: bool,
    can_sign: bool,
    params: BTreeMap<&'static str, &'static str>,
    config: String,
}

impl PresetDescription {
    fn of(preset: &'static Preset) -> Self {
        let (event_id, event_type) = signing::selectors(preset);
        Self {
            name: preset.name,
            title: preset.title,
            scheme: preset.scheme(),
            signed: preset.signed,
            not_signed: preset.unsigned,
            replay_guard: preset.guarded(),
            secret: preset.secret,
            event_id,
            event_type,
            retries: preset.retries,
            retry_waits_seconds: preset.schedule.map(|schedule| schedule.waits_seconds),
            retries_documented_at: preset.schedule.map(|schedule| schedule.documented_at),
            tolerance: preset.tolerance,
            signs_retries_afresh: preset.signs_retries_afresh,
            can_sign: preset.can_sign(),
            config: config_block(preset),
            params: preset.params().iter().map(|param| (param.name, param.meaning)).collect(),
        }
    }
}

/// A config block that `check-config` accepts once the variables in it are set.
fn config_block(preset: &Preset) -> String {
    let name = preset.name;
    let variable = name.to_ascii_uppercase().replace(['-', '.'], "_");
    let mut block = format!("[sources.{name}]\nprovider = \"{name}\"\n");
    if preset.needs_secret() {
        block.push_str(&format!("secrets = [\"env:{variable}_SECRET\"]\n"));
    }
    let required: Vec<_> = preset.params().iter().filter(|param| param.required).collect();
    if !required.is_empty() {
        let params: Vec<String> = required
            .into_iter()
            .map(|param| param.name)
            .map(|key| match key {
                "cert_pem" | "ca_pem" => format!("{key} = \"file:{name}-{key}.pem\""),
                "jwks" => format!("{key} = \"file:{name}-jwks.json\""),
                _text => format!("{key} = \"env:{variable}_{}\"", key.to_ascii_uppercase()),
            })
            .collect();
        block.push_str(&format!("params = {{ {} }}\n", params.join(", ")));
    }
    block
}

fn table() -> Result<(), CommandFailure> {
    let rows: Vec<[String; 4]> = presets::all()
        .iter()
        .map(PresetDescription::of)
        .map(|it| [it.name, &it.scheme, &it.event_id, &it.event_type].map(shortened))
        .collect();
    let head = ["NAME", "SCHEME", "EVENT ID", "EVENT TYPE"].map(str::to_owned);
    let width = |column: usize| {
        rows.iter().chain([&head]).map(|row| row[column].chars().count()).max().unwrap_or(0)
    };
    let widths = [width(0), width(1), width(2)];
    for row in [&head].into_iter().chain(&rows) {
        let [name, scheme, id, event_type] = row;
        let [first, second, third] = widths;
        let line = format!("{name:first$}  {scheme:second$}  {id:third$}  {event_type}");
        output::data(line.trim_end())?;
    }
    Ok(())
}

/// Shortens a text to fit its column; `hapax providers NAME` prints it in full.
fn shortened(text: &str) -> String {
    const CHARS_MAX: usize = 44;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// A wait in its largest whole unit.
fn in_words(seconds: u64) -> String {
    match seconds {
        hours if hours % 3_600 == 0 => format!("{} h", hours / 3_600),
        minutes if minutes % 60 == 0 => format!("{} min", minutes / 60),
        seconds => format!("{seconds} s"),
    }
}

fn in_full(it: &PresetDescription) -> Result<(), CommandFailure> {
    let afresh = if it.signs_retries_afresh {
        "yes"
    } else {
        "not known to do so: late retries go to review"
    };
    let can_sign = if it.can_sign { "yes" } else { "no: only the sender has the private key" };
    let waits = match (it.retry_waits_seconds, it.retries_documented_at) {
        (Some(waits), Some(documented_at)) => {
            let waits: Vec<String> = waits.iter().map(|wait| in_words(*wait)).collect();
            format!("{} (documented at {documented_at})", waits.join(", "))
        }
        (_, _) => "no schedule is documented".to_owned(),
    };
    let lines = [
        ("name", it.name),
        ("title", it.title),
        ("scheme", &it.scheme),
        ("signed", it.signed),
        ("not signed", it.not_signed),
        ("replay guard", &it.replay_guard),
        ("secret", it.secret),
        ("event id", &it.event_id),
        ("event type", &it.event_type),
        ("retries", it.retries),
        ("retry waits", &waits),
        ("own tolerance", it.tolerance),
        ("signed afresh", afresh),
        ("can be sent", can_sign),
    ];
    let params = it.params.iter().map(|(name, meaning)| (*name, *meaning));
    for (label, text) in lines.into_iter().chain(params) {
        output::data(&format!("{label:<14} {text}"))?;
    }
    output::data("")?;
    output::data(it.config.trim_end())?;
    Ok(())
}
