// Access to the browser's storage, which may be full or blocked, or contain invalid values.

export function read(key, storage = "localStorage") {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

// Return whether the value is stored.
export function write(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, value);
    return true;
  } catch {
    return false;
  }
}

export function remove(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // nothing is stored
  }
}

export function keys(prefix) {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(prefix));
  } catch {
    return [];
  }
}

export function readJson(key) {
  try {
    return JSON.parse(read(key));
  } catch {
    return null;
  }
}
