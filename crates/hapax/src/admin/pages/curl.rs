//! An arrival as a command to paste into a shell.

use std::fmt::Write as _;

use hapax_core::hop_headers::is_hop_by_hop;

use crate::api::Event;
use crate::format::url_part;
use crate::logs::needs_escape;

/// The largest body that is part of the command, in bytes. Linux accepts arguments of at most 128 KiB.
const BODY_BYTES_MAX: usize = 100_000;

/// The command that posts the event to this server again, with the headers that are stored.
pub(super) fn command(public_url: &str, event: &Event) -> String {
    let of = &event.summary;
    let source = url_part(&of.source);
    let tenant = url_part(&of.tenant);
    let path = match of.tenant.as_str() {
        "default" => source,
        _ => format!("{tenant}/{source}"),
    };
    let url = format!("{}/webhooks/{path}", public_url.trim_end_matches('/'));
    let mut command = String::new();
    let body = match (&event.body.body, &event.body.body_base64) {
        (Some(body), _) if body.len() <= BODY_BYTES_MAX => quoted(body),
        (Some(_), _) => "@body".to_owned(),
        (None, Some(encoded)) if encoded.len() <= BODY_BYTES_MAX => {
            let _ = write!(command, "echo {} | base64 -d | ", quoted(encoded));
            "@-".to_owned()
        }
        (None, Some(_)) => "@body".to_owned(),
        (None, None) => quoted(""),
    };
    let _ = write!(command, "curl {}", quoted(&url));
    for (name, value) in &event.headers {
        let is_ours = matches!(&*name.to_ascii_lowercase(), "host" | "content-length" | "expect");
        if !is_ours && !is_hop_by_hop(name) {
            let _ = write!(command, " \\\n  -H {}", quoted(&format!("{name}: {value}")));
        }
    }
    // `--data-binary` reads a file if its argument begins with @. `--data-raw` sends such an
    // argument as it is.
    let flag = if body.starts_with('@') { "--data-binary" } else { "--data-raw" };
    let _ = write!(command, " \\\n  {flag} {body}");
    command
}

/// The text as one word of a shell. Characters that a page cannot show as they are become escapes of bytes, which
/// bash, zsh and ksh read.
fn quoted(text: &str) -> String {
    if !text.chars().any(needs_escape) {
        return format!("'{}'", text.replace('\'', r"'\''"));
    }
    let mut word = String::from("$'");
    for c in text.chars() {
        match c {
            '\'' | '\\' => word.extend(['\\', c]),
            c if needs_escape(c) => {
                let mut bytes = [0; 4];
                for byte in c.encode_utf8(&mut bytes).bytes() {
                    // An escape has three octal digits, so that a digit after it is not part of it.
                    let _ = write!(word, "\\{byte:03o}");
                }
            }
            c => word.push(c),
        }
    }
    word.push('\'');
    word
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_reads_every_text_as_one_word_with_the_same_bytes() {
        let texts = [
            "plain",
            "",
            "it's $HOME `id` $(id) \"x\" \\ !",
            "two\nlines\tand\r\n",
            "\u{202e}hidden\u{200b}1'\\x",
            "@file",
            "-d",
            "\u{1b}[31m7",
        ];
        for text in texts {
            let script = format!("printf %s {}", quoted(text));
            let said = Command::new("bash").arg("-c").arg(&script).output().expect("bash runs");
            assert_eq!(said.stdout, text.as_bytes(), "{script}");
            assert!(!quoted(text).chars().any(needs_escape), "{script:?}");
        }
    }
}
