//! The method and the path of a request, from its first line.

/// The method of a request line. `None` if what stands there is none, as of a request in TLS.
pub(super) fn method(request: &[u8]) -> Option<&[u8]> {
    let end = request.iter().position(|&b| b == b' ')?;
    let method = &request[..end];
    let is_method = |b: &u8| b.is_ascii_alphabetic() || *b == b'-';
    let is_word = method.first().is_some_and(u8::is_ascii_alphabetic);
    Some(method).filter(|method| is_word && method.iter().all(is_method))
}

/// The path of a request line, without query and fragment; for an absolute URI, its path. `None` if
/// the request has no path.
pub(super) fn path(request: &[u8]) -> Option<&[u8]> {
    target_path(target(request)?)
}

/// The target of a request line, if it has one.
pub(super) fn target(request: &[u8]) -> Option<&[u8]> {
    let rest = request[method(request)?.len()..].trim_ascii();
    // A target that contains spaces, against the standard, extends to the protocol.
    match rest.iter().rposition(|&b| b == b' ') {
        Some(at) if rest[at + 1..].starts_with(b"HTTP/") => Some(rest[..at].trim_ascii_end()),
        _ if rest.starts_with(b"HTTP/") => None,
        _ => Some(rest),
    }
}

/// The host that an absolute target names, without its port.
pub(super) fn authority(target: &[u8]) -> Option<&[u8]> {
    let scheme_end = target.iter().take(16).position(|&b| b == b':')?;
    let rest = target.get(scheme_end..)?.strip_prefix(b"://")?;
    let end = rest.iter().position(|b| b"/?#".contains(b)).unwrap_or(rest.len());
    Some(host_name(&rest[..end])).filter(|host| !host.is_empty())
}

/// A host without its port.
pub(super) fn host_name(host: &[u8]) -> &[u8] {
    let colon = host.iter().rposition(|&b| b == b':');
    let port = |at: usize| at + 1 < host.len() && host[at + 1..].iter().all(u8::is_ascii_digit);
    colon.filter(|at| port(*at)).map_or(host, |at| &host[..at])
}

/// Whether a word may be the name of a host, or `-` in its place.
pub(super) fn is_host(word: &[u8]) -> bool {
    let is_part = |b: &u8| b.is_ascii_alphanumeric() || b".-_".contains(b) || *b >= 0x80;
    let is_number = word.iter().all(|b| b.is_ascii_digit() || *b == b'.');
    !is_number && word.iter().all(is_part)
}

/// The path of a request's target.
pub(super) fn target_path(target: &[u8]) -> Option<&[u8]> {
    let end = target.iter().position(|b| matches!(b, b'?' | b'#')).unwrap_or(target.len());
    let target = &target[..end];
    if target.starts_with(b"/") || target == b"*" {
        return Some(target);
    }
    let scheme_end = target.windows(3).position(|three| three == b"://")?;
    let authority = &target[scheme_end + 3..];
    Some(authority.iter().position(|&b| b == b'/').map_or(b"/", |slash| &authority[slash..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_excludes_query_and_fragment() {
        for (request, expected) in [
            ("GET / HTTP/1.1", Some("/")),
            ("GET /a/b?x=1#y HTTP/1.1", Some("/a/b")),
            ("GET /a#y?x HTTP/1.0", Some("/a")),
            ("GET /a", Some("/a")),
            ("GET /a b HTTP/1.1", Some("/a b")),
            ("GET http://example.com/a?x HTTP/1.1", Some("/a")),
            ("GET http://example.com HTTP/1.1", Some("/")),
            ("M-SEARCH * HTTP/1.1", Some("*")),
            (r#"GET /\"quoted\" HTTP/1.1"#, Some(r#"/\"quoted\""#)),
            ("CONNECT example.com:443 HTTP/1.1", None),
            ("-", None),
            ("- - -", None),
            ("GET", None),
            ("GET HTTP/1.1", None),
            (r"\x16\x03\x01", None),
            (r"\x16 /a", None),
            ("", None),
        ] {
            let path = path(request.as_bytes()).map(|path| str::from_utf8(path).unwrap());
            assert_eq!(path, expected, "{request}");
        }
    }
}
