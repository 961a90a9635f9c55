//! Numbers as people read them.

use jiff::Timestamp;

/// A size in binary units: exact where it can be, else with one digit after the point.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 6] = [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (shift, unit) in UNITS {
        let one = 1u64 << shift;
        if bytes >= one {
            if bytes.is_multiple_of(one) {
                return format!("{} {unit}", bytes >> shift);
            }
            let tenths = (u128::from(bytes) * 10) >> shift;
            return format!("{}.{} {unit}", tenths / 10, tenths % 10);
        }
    }
    format!("{bytes} B")
}

/// Time from `then` to `now`; nothing is older than now.
pub(crate) fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (1, ..) => "1 day".to_owned(),
        (2.., ..) => format!("{days} days"),
        (_, 1.., _) => format!("{hours}h{:02}m", minutes % 60),
        (_, _, 1..) => format!("{minutes}m"),
        _ => format!("{seconds}s"),
    }
}

/// Text that cannot break a line or command a terminal.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Text of one or more lines, each indented by two blanks and unable to command a terminal.
pub(crate) fn lines(text: &str) -> String {
    text.lines().map(|line| format!("  {}", plain(line.trim_start()))).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_binary_units() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 20, "1 MiB"),
            (32 << 30, "32 GiB"),
            (65452 << 20, "63.9 GiB"),
            (1 << 40, "1 TiB"),
            (u64::MAX, "15.9 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn ages_are_as_coarse_as_people_want_them() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        for (seconds, text) in [
            (-5, "0s"),
            (41, "41s"),
            (120, "2m"),
            (3 * 3600 + 12 * 60, "3h12m"),
            (86_400, "1 day"),
            (4 * 86_400 + 5, "4 days"),
        ] {
            assert_eq!(age(Timestamp::from_second(1_000_000 - seconds).unwrap(), now), text);
        }
    }

    #[test]
    fn text_of_others_cannot_command_the_terminal() {
        assert_eq!(plain("a\x1b[31mb\nc"), "a [31mb c");
    }
}
