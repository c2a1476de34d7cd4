//! Logs to stderr as text or JSON. A thread writes the lines from a bounded queue. When the queue is full,
//! lines are dropped, so that logging never delays a request.
//!
//! Values in a log line may come from a sender. Control characters are escaped in both formats, so that no
//! sender can forge a line or control a terminal.

use std::fmt::{self, Write as _};

use anstream::ColorChoice;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::{InvalidSetting, LogFormat, LogSettings};

/// The most lines in the queue: some seconds of a busy server, a few MiB.
const LINES_WAITING_MAX: usize = 16_384;

/// The longest logged value, in characters.
const VALUE_CHARS_MAX: usize = 512;

/// Starts logging. Dropping the guard writes the lines in the queue.
pub(crate) fn start(settings: &LogSettings) -> anyhow::Result<WorkerGuard> {
    let filter = filter(&settings.level).map_err(|invalid| anyhow::anyhow!(invalid.problem))?;
    let (writer, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(LINES_WAITING_MAX)
        .thread_name("hapax-log")
        .finish(std::io::stderr());
    let registry = tracing_subscriber::registry().with(filter);
    match settings.format {
        LogFormat::Json => {
            let layer = tracing_subscriber::fmt::layer()
                .json()
                .flatten_event(true)
                .with_span_list(false)
                .with_writer(writer);
            registry.with(layer).try_init()?;
        }
        LogFormat::Human => {
            let choice = anstream::AutoStream::choice(&std::io::stderr());
            let colour = choice != ColorChoice::Never;
            let layer = tracing_subscriber::fmt::layer()
                .fmt_fields(HumanFields)
                .event_format(HumanLine { colour })
                .with_writer(writer);
            registry.with(layer).try_init()?;
        }
    }
    Ok(guard)
}

/// A level, or directives as in `info,hapax_store=debug`.
pub(crate) fn filter(text: &str) -> Result<EnvFilter, InvalidSetting> {
    let bad = || {
        InvalidSetting::new(
            format!("\"{}\" is not a log level", text.escape_debug()),
            "write off, error, warn, info, debug or trace, or directives such as \
             \"info,hapax_store=debug\"",
        )
    };
    // EnvFilter takes an unknown word for a module name, which would silence everything else.
    let is_level = |part: &str| {
        part.contains('=') || part.parse::<tracing::level_filters::LevelFilter>().is_ok()
    };
    if text.trim().is_empty() || !text.split(',').all(|part| is_level(part.trim())) {
        return Err(bad());
    }
    EnvFilter::builder().parse(text).map_err(|_| bad())
}

/// One line: time, level, message, fields.
struct HumanLine {
    colour: bool,
}

impl<S, N> FormatEvent<S, N> for HumanLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = *event.metadata().level();
        let now = hapax_core::Timestamp::now();
        if self.colour {
            let code = match level {
                Level::ERROR => "31",
                Level::WARN => "33",
                Level::INFO => "32",
                Level::DEBUG => "34",
                Level::TRACE => "35",
            };
            write!(writer, "\u{1b}[2m{now:.3}\u{1b}[0m \u{1b}[{code}m{level:>5}\u{1b}[0m ")?;
        } else {
            write!(writer, "{now:.3} {level:>5} ")?;
        }
        ctx.field_format().format_fields(writer.by_ref(), event)?;
        for span in ctx.event_scope().into_iter().flatten() {
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>()
                && !fields.is_empty()
            {
                write!(writer, " {fields}")?;
            }
        }
        writeln!(writer)
    }
}

/// Formats the message first, then `name=value`, all escaped.
struct HumanFields;

impl<'w> FormatFields<'w> for HumanFields {
    fn format_fields<R: tracing_subscriber::field::RecordFields>(
        &self,
        mut writer: Writer<'w>,
        fields: R,
    ) -> fmt::Result {
        let mut line = LogLine::default();
        fields.record(&mut line);
        let separator = if line.message.is_empty() || line.fields.is_empty() { "" } else { " " };
        write!(writer, "{}{separator}{}", line.message, line.fields)
    }
}

#[derive(Default)]
struct LogLine {
    message: String,
    fields: String,
}

impl LogLine {
    fn add(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            escape(value, &mut self.message);
            return;
        }
        if !self.fields.is_empty() {
            self.fields.push(' ');
        }
        self.fields.push_str(field.name());
        self.fields.push('=');
        escape(value, &mut self.fields);
    }
}

impl Visit for LogLine {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut source = value.source();
        while let Some(error) = source {
            let _ = write!(text, ": {error}");
            source = error.source();
        }
        self.add(field, &text);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }
}

/// Whether a character can control a terminal, break a line or hide: control characters, line and paragraph
/// separators, marks for the direction of text, and characters that show nothing.
pub(crate) fn needs_escape(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// The text with every character that [`needs_escape`] as an escape sequence.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if needs_escape(c) {
            escaped.extend(c.escape_default());
        } else {
            escaped.push(c);
        }
    }
    escaped
}

fn escape(value: &str, line: &mut String) {
    match value.char_indices().nth(VALUE_CHARS_MAX) {
        None => line.push_str(&escaped(value)),
        Some((end, _)) => {
            line.push_str(&escaped(&value[..end]));
            line.push('…');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_from_a_sender_can_neither_forge_a_line_nor_control_a_terminal() {
        let mut line = String::new();
        escape("evt_1\r\n2026 INFO paid\u{1b}[2J\u{202e}x\u{9b}", &mut line);
        assert_eq!(line, r"evt_1\r\n2026 INFO paid\u{1b}[2J\u{202e}x\u{9b}");
        let mut long = String::new();
        escape(&"x".repeat(10_000), &mut long);
        assert_eq!(long.chars().count(), VALUE_CHARS_MAX + 1);
    }

    #[test]
    fn what_cannot_be_seen_is_written_out() {
        // Two ids that differ only in such characters would look the same.
        for hidden in ["\u{200b}", "\u{2060}", "\u{ad}", "\u{feff}", "\u{e0041}", "\u{3164}"] {
            let shown = escaped(&format!("evt{hidden}1"));
            assert!(shown.starts_with("evt\\u{"), "{shown}");
        }
        assert_eq!(escaped("Zürich 東京 €"), "Zürich 東京 €");
    }

    #[test]
    fn a_mistyped_level_is_refused_rather_than_taken_for_a_module() {
        assert!(filter("debug").is_ok() && filter("warn,hapax_store=trace").is_ok());
        for bad in ["", "inof", "verbose", "info,loud"] {
            assert!(filter(bad).is_err(), "{bad:?}");
        }
    }
}
