//! Formats of names, strings and versions, with the API server's messages.

const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";

/// Checks a DNS label of at most 63 bytes.
pub(crate) fn label(text: &str) -> Result<(), &'static str> {
    let middle = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let edge = |b: Option<&u8>| b.is_some_and(|b| *b != b'-');
    let bytes = text.as_bytes();
    if bytes.len() > 63 {
        return Err("must be no more than 63 bytes");
    }
    let good = bytes.iter().all(|b| middle(*b)) && edge(bytes.first()) && edge(bytes.last());
    if good { Ok(()) } else { Err(LABEL) }
}

/// Checks a DNS subdomain of at most `longest` bytes.
pub(crate) fn subdomain(text: &str, longest: usize) -> Result<(), &'static str> {
    if text.len() > longest {
        return Err("must be no more bytes than allowed");
    }
    let part = |p: &str| {
        let middle = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let bytes = p.as_bytes();
        !bytes.is_empty()
            && bytes.iter().all(|b| middle(*b))
            && bytes.first() != Some(&b'-')
            && bytes.last() != Some(&b'-')
    };
    if text.split('.').all(part) { Ok(()) } else { Err(SUBDOMAIN) }
}

/// Checks a C identifier.
pub(crate) fn identifier(text: &str) -> Result<(), &'static str> {
    let bytes = text.as_bytes();
    let good = bytes.first().is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_')
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_');
    if good {
        Ok(())
    } else {
        Err(
            "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_'",
        )
    }
}

/// Checks the key of a taint: as a label key.
pub(crate) fn label_key(text: &str) -> Result<(), &'static str> {
    let (prefix, name) = match text.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, text),
    };
    if let Some(prefix) = prefix {
        subdomain(prefix, 253)?;
    }
    if name.is_empty() {
        return Err("name part must be non-empty");
    }
    label_value(name)
}

/// Checks the value of a taint: as a label value.
pub(crate) fn label_value(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Ok(());
    }
    let bytes = text.as_bytes();
    if bytes.len() > 63 {
        return Err("must be no more than 63 bytes");
    }
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let good = bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
        && edge(bytes.first())
        && edge(bytes.last());
    if good {
        Ok(())
    } else {
        Err(
            "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character",
        )
    }
}

/// Checks a semantic version 2.0.0 as strictly as its specification.
pub(crate) fn version(text: &str) -> Result<(), &'static str> {
    const WRONG: &str = "must be a string compatible with semver.org spec 2.0.0";
    let number = |p: &str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()) && (p == "0" || !p.starts_with('0'));
    let word = |p: &str| !p.is_empty() && p.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let (rest, build) = match text.split_once('+') {
        Some((rest, build)) => (rest, Some(build)),
        None => (text, None),
    };
    let (core, pre) = match rest.split_once('-') {
        Some((core, pre)) => (core, Some(pre)),
        None => (rest, None),
    };
    let parts: Vec<&str> = core.split('.').collect();
    let core_good = parts.len() == 3 && parts.iter().all(|p| number(p));
    let pre_good =
        pre.is_none_or(|p| p.split('.').all(|w| word(w) && (!w.bytes().all(|b| b.is_ascii_digit()) || number(w))));
    let build_good = build.is_none_or(|b| b.split('.').all(word));
    if core_good && pre_good && build_good { Ok(()) } else { Err(WRONG) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_strictly() {
        for good in ["0.0.0", "1.2.3", "24.1.0", "1.0.0-rc.1+build.5", "1.0.0-alpha-1", "1.0.0+007"] {
            assert!(version(good).is_ok(), "{good}");
        }
        for bad in ["", "1", "1.2", "01.2.3", "1.02.3", "1.2.3.4", "v1.2.3", "1.2.3-", "1.2.3-01", "1.2.3+", "24.1.rc2"]
        {
            assert!(version(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_are_checked_by_their_kind() {
        assert!(label("npu-0").is_ok() && label("-a").is_err() && label("A").is_err() && label("a.b").is_err());
        assert!(label(&"a".repeat(63)).is_ok() && label(&"a".repeat(64)).is_err());
        assert!(identifier("memCapacity").is_ok() && identifier("Bus-Id").is_err() && identifier("9a").is_err());
        assert!(label_key("npu.huawei.com/health").is_ok() && label_key("a/").is_err());
    }
}
