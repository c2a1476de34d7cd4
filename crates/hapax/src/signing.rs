//! The secret and parameters of a preset in dev mode, and its selectors as the config writes them.

use std::collections::BTreeMap;

use aws_lc_rs::hmac;
use hapax_core::presets::{Preset, PresetId};
use hapax_core::secret::Secret;

/// The secret of this sender in dev mode: HMAC-SHA256 of the preset's name under the dev secret, in the form
/// of this preset's secrets. A signature or a handshake of one sender is therefore not valid for another.
pub(crate) fn dev_secret(preset: &Preset, dev: &str) -> Option<Secret> {
    preset.secret_from(&derived(dev, preset.name))
}

/// The parameters of this preset, with values for dev mode.
pub(crate) fn dev_params(preset: &Preset, dev: &str) -> BTreeMap<String, String> {
    preset
        .params()
        .iter()
        .filter_map(|param| match param.name {
            "verify_token" => {
                let token = derived(dev, &format!("{} verify_token", preset.name));
                Some((param.name.to_owned(), hex::encode(token)))
            }
            name if param.required => Some((name.to_owned(), "dev".to_owned())),
            _optional => None,
        })
        .collect()
}

fn derived(dev: &str, name: &str) -> [u8; 32] {
    let key = hmac::Key::new(hmac::HMAC_SHA256, dev.as_bytes());
    let mut bytes = [0; 32];
    bytes.copy_from_slice(hmac::sign(&key, name.as_bytes()).as_ref());
    bytes
}

/// The selectors of a preset's id and type, as the config writes them.
pub(crate) fn selectors(preset: &Preset) -> (String, String) {
    let id = match preset.envelope.id {
        PresetId::Selector(selector) => selector.to_owned(),
        PresetId::FirstOf(selectors) => format!("first of {}", selectors.join(", ")),
        PresetId::Joined(selectors) => selectors.join(" + "),
        PresetId::Hash { fields, within } => {
            let span = within.map(|seconds| match seconds {
                0..60 => format!(" within {seconds} s"),
                60.. => format!(" within {} min", seconds / 60),
            });
            format!("hash of {}{}", fields.join(", "), span.unwrap_or_default())
        }
    };
    let id = match preset.envelope.items {
        None => id,
        Some("") => format!("{id} in each element"),
        Some(items) => format!("{id} in each of {items}"),
    };
    (id, preset.envelope.event_type.join(" + "))
}
