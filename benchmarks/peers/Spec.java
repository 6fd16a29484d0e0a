import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/** The input of the process: `name=value` arguments, with the names of the Python class `Spec`. */
record Spec(Map<String, String> values) {
    static Spec by(String[] arguments) {
        Map<String, String> values = new HashMap<>();
        for (String argument : arguments) {
            int sign = argument.indexOf('=');
            values.put(argument.substring(0, sign), argument.substring(sign + 1));
        }
        return new Spec(values);
    }

    String text(String name) {
        return values.get(name);
    }

    int number(String name) {
        return Integer.parseInt(values.get(name));
    }

    double seconds(String name) {
        return Double.parseDouble(values.get(name));
    }

    /** Returns one number per partition. */
    int[] ends(String name) {
        return Arrays.stream(values.get(name).split(",")).mapToInt(Integer::parseInt).toArray();
    }

    /** Returns the spec of the warm-up run, over another topic. */
    Spec warmingUp() {
        Map<String, String> values = new HashMap<>(this.values);
        values.put("topic", text("warm_up"));
        values.put("ends", text("warm_up_ends"));
        values.put("group", text("group") + "-warm-up");
        values.put("records", Integer.toString(Arrays.stream(ends("warm_up_ends")).sum()));
        return new Spec(values);
    }
}
